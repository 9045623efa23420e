#include "memory/shared_heap.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "fsdp/error.h"

namespace fsdp::memory {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kGiB = std::int64_t{1} << 30;

struct Opened {
  std::mutex mutex;
  std::weak_ptr<SharedHeap> heap;
};

// Never destroyed: blocks may be freed among the destructors of static objects.
Opened& opened_heap() {
  static auto& opened = *new Opened();
  return opened;
}

// The file must not be executable, because some systems refuse executable files without a name. Older systems do not know the flag.
int open_memfd() {
  constexpr unsigned kNoExec = 0x0008U;  // MFD_NOEXEC_SEAL, which older headers lack
  const int fd = memfd_create("libfsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExec);
  return fd < 0 && errno == EINVAL ? memfd_create("libfsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

std::int64_t round_up(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

// Returns the size of the machine's memory. Blocks can't take more, and only blocks have pages.
std::int64_t file_size() { return round_up(static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE), kGiB); }

[[noreturn]] void refuse(const std::string& what, int error) { throw Error(what + ": " + std::strerror(error)); }

int make_file(std::int64_t size) {
  rlimit limit{};
  // Beyond this limit the system does not refuse, but sends a signal.
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(size)) refuse("the limit of files' sizes", EFBIG);
  const int fd = open_memfd();
  if (fd < 0) refuse("memfd_create", errno);
  // The seals keep any process from making the file shorter, so reading it never fails.
  if (ftruncate(fd, size) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    refuse("sizing and sealing a memfd", error);
  }
  return fd;
}

struct HeapBlock {
  std::shared_ptr<SharedHeap> heap;
  std::int64_t offset;
  std::int64_t bytes;
  bool stays = false;
};

}  // namespace

std::shared_ptr<SharedHeap> SharedHeap::open() {
  static const int registered = pthread_atfork([] { opened_heap().mutex.lock(); }, [] { opened_heap().mutex.unlock(); }, &after_fork);
  if (registered != 0) refuse("pthread_atfork", registered);
  const std::lock_guard<std::mutex> lock(opened_heap().mutex);
  if (auto heap = opened_heap().heap.lock()) return heap;
  const std::int64_t size = file_size();
  const int fd = make_file(size);
  void* const base = mmap(nullptr, static_cast<std::size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    close(fd);
    refuse("mapping a memfd", error);
  }
  madvise(base, static_cast<std::size_t>(size), MADV_HUGEPAGE);  // This may fail.
  madvise(base, static_cast<std::size_t>(size), MADV_DONTDUMP);  // Otherwise a core dump would seem as large as the machine's memory.
  std::shared_ptr<SharedHeap> heap(new SharedHeap(fd, base, size));
  opened_heap().heap = heap;
  return heap;
}

std::shared_ptr<SharedHeap> SharedHeap::opened() {
  const std::lock_guard<std::mutex> lock(opened_heap().mutex);
  return opened_heap().heap.lock();
}

// Called in the child, which holds the mutex.
void SharedHeap::after_fork() {
  if (const auto heap = opened_heap().heap.lock()) heap->become_private();
  opened_heap().heap.reset();
  opened_heap().mutex.unlock();
}

/// Makes the mapping private: the parent no longer sees writes of this process. (This process still sees what the parent writes to pages
/// that it has not written itself.)
void SharedHeap::become_private() {
  const auto size = static_cast<std::size_t>(size_);
  const auto map = [&](int access, int kind) { return mmap(base_, size, access, kind | MAP_FIXED | MAP_NORESERVE, fd_, 0) != MAP_FAILED; };
  // A system without memory overcommit may refuse a private copy of the whole range.
  if (!map(PROT_READ | PROT_WRITE, MAP_PRIVATE)) map(PROT_READ, MAP_SHARED);
}

SharedHeap::SharedHeap(int fd, void* base, std::int64_t size)
    : process_(getpid()), fd_(fd), base_(static_cast<char*>(base)), size_(size), free_{{kPage, size - kPage}} {}

SharedHeap::~SharedHeap() {
  munmap(base_, static_cast<std::size_t>(size_));
  close(fd_);
}

bool SharedHeap::is_own() const { return getpid() == process_; }

c10::DataPtr SharedHeap::allocate(std::int64_t bytes) {
  if (!is_own()) return {};
  const std::int64_t needed = round_up(bytes == 0 ? 1 : bytes, kPage);
  std::int64_t offset = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto range = free_.begin();
    while (range != free_.end() && range->second < needed) ++range;
    if (range == free_.end()) return {};
    offset = range->first;
    const std::int64_t rest = range->second - needed;
    free_.erase(range);
    if (rest > 0) free_.emplace(offset + needed, rest);
  }
  auto* const block = new HeapBlock{shared_from_this(), offset, needed};
  return {base_ + offset, block, &free_block, c10::Device(c10::kCPU)};
}

void SharedHeap::free_block(void* context) {
  const std::unique_ptr<HeapBlock> freed(static_cast<HeapBlock*>(context));
  if (!freed->stays) freed->heap->give_back(freed->offset, freed->bytes);
}

bool SharedHeap::is_block(const c10::DataPtr& memory) { return memory.get_deleter() == &free_block; }

void SharedHeap::leave_behind(c10::DataPtr block) { static_cast<HeapBlock*>(block.get_context())->stays = true; }

void SharedHeap::give_back(std::int64_t offset, std::int64_t bytes) {
  if (!is_own()) return;  // The parent may still use it.
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto range = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(range); next != free_.end() && offset + bytes == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second != offset) return;
  previous->second += range->second;
  free_.erase(range);
}

std::optional<std::int64_t> SharedHeap::offset_of(const void* data) const {
  const auto* const address = static_cast<const char*>(data);
  if (!is_own() || address < base_ || address >= base_ + size_) return std::nullopt;
  return address - base_;
}

}  // namespace fsdp::memory
