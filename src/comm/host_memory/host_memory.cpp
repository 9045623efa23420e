#include "comm/host_memory/host_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <utility>

#include "base/process.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<HostMemory> host_memory;
};

Current& current() { return of_this_process<Current>(); }

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "processes share atomics");

// Returns a descriptor that becomes readable when the process ends; -1 if there is no such process, or the system has no such call.
int open_process([[maybe_unused]] std::int64_t process) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, process, 0));
#else
  return -1;
#endif
}

std::atomic<bool> several{true};  // until the system reports that it has no such call

#if defined(SYS_futex_waitv) && defined(FUTEX_32)
constexpr std::size_t kWords = 128;  // the system's limit

// Returns false if the system has no such call.
bool sleep_on_all(const std::vector<WatchedWord>& words, std::int64_t microseconds) {
  if (!can_sleep_on_several() || words.size() > kWords) return false;
  std::array<futex_waitv, kWords> waits{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    waits[i].val = words[i].seen;
    waits[i].uaddr = reinterpret_cast<std::uintptr_t>(words[i].word);
    waits[i].flags = FUTEX_32;
  }
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += microseconds * 1000;
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  if (syscall(SYS_futex_waitv, waits.data(), words.size(), 0, &until, CLOCK_MONOTONIC) >= 0) return true;
  if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return true;
  several = false;
  return false;
}
#else
bool sleep_on_all(const std::vector<WatchedWord>&, std::int64_t) {
  several = false;
  return false;
}
#endif

}  // namespace

std::shared_ptr<const PeerHeap> PeerHeap::find(const HeapAddress& address) {
  // The process is opened before its heap. If another process has got the number meanwhile, it does not have this heap.
  std::shared_ptr<PeerHeap> heap(new PeerHeap(open_process(address.process)));
  return heap->map(address) && heap->head().nonce == address.nonce ? heap : nullptr;
}

bool PeerHeap::map(const HeapAddress& address) {
  const std::string path = "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.fd);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0 && errno == ENOENT) return false;
  if (fd < 0) throw Error("opening " + path + ": " + std::strerror(errno));
  // Another file with that name could not be read safely, because it may become shorter.
  struct stat file {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &file) != 0 || file.st_size != address.size) {
    close(fd);
    return false;
  }
  const auto size = static_cast<std::size_t>(address.size);
  void* const base = mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  const int error = errno;
  close(fd);
  if (base == MAP_FAILED) throw Error("mapping " + path + ": " + std::strerror(error));
  madvise(base, size, MADV_DONTDUMP);
  base_ = static_cast<const char*>(base);
  size_ = address.size;
  return true;
}

PeerHeap::~PeerHeap() {
  if (base_ != nullptr) munmap(const_cast<char*>(base_), static_cast<std::size_t>(size_));
  if (owner_ >= 0) close(owner_);
}

bool PeerHeap::has_lost_owner() const {
  pollfd owner{.fd = owner_, .events = POLLIN, .revents = 0};
  if (owner_ < 0 || poll(&owner, 1, 0) != 1) return false;
  // An alarm of the ended process may still arrive through the connection, with more information.
  constexpr std::chrono::nanoseconds kGrace = std::chrono::milliseconds(500);
  const std::int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::int64_t first = 0;
  return !lost_.compare_exchange_strong(first, now) && now - first >= kGrace.count();
}

std::shared_ptr<HostMemory> HostMemory::open() {
  auto heap = memory::SharedHeap::open();
  const std::lock_guard<std::mutex> lock(current().mutex);
  auto known = current().host_memory.lock();
  if (known != nullptr && known->heap_ == heap) return known;  // A forked process has a heap of its own.
  std::shared_ptr<HostMemory> made(new HostMemory(std::move(heap)));
  current().host_memory = made;
  return made;
}

std::shared_ptr<HostMemory> HostMemory::opened() {
  const std::lock_guard<std::mutex> lock(current().mutex);
  return current().host_memory.lock();
}

HostMemory::HostMemory(std::shared_ptr<memory::SharedHeap> heap) : heap_(std::move(heap)) {
  if (head().nonce[0] != 0) return;  // The heap is older: blocks have kept it.
  std::random_device random;
  for (auto& word : head().nonce) word = (std::uint64_t{random()} << 32) | random() | 1u;
}

HostMemory::~HostMemory() {
  for (auto& mailbox : kept_for_late_peers_) memory::SharedHeap::leave_behind(std::move(mailbox));
}

HeapAddress HostMemory::address() const {
  const auto* head = static_cast<const HeapHead*>(heap_->first_page());
  return {.process = getpid(), .fd = heap_->fd(), .size = heap_->size(), .nonce = head->nonce};
}

std::shared_ptr<const PeerHeap> HostMemory::peer(const HeapAddress& address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto known = peers_.find(address.nonce); known != peers_.end()) {
    if (auto heap = known->second.lock()) return heap;
  }
  auto heap = PeerHeap::find(address);
  if (heap != nullptr) peers_[address.nonce] = heap;
  return heap;
}

std::vector<std::shared_ptr<const PeerHeap>> HostMemory::peers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<const PeerHeap>> all;
  for (const auto& [nonce, peer] : peers_) {
    if (auto heap = peer.lock()) all.push_back(std::move(heap));
  }
  return all;
}

// Works like a slot pool: there are never more blocks than were ever lent at once.
HostMemory::Block HostMemory::borrow(std::int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto fit = blocks_.lower_bound(bytes); fit != blocks_.end()) {
    Block block{.memory = std::move(fit->second), .bytes = fit->first};
    blocks_.erase(fit);
    return block;
  }
  if (!blocks_.empty()) blocks_.erase(std::prev(blocks_.end()));
  Block block{.memory = heap_->allocate(bytes), .bytes = bytes};
  if (!block.memory) C10_THROW_ERROR(OutOfMemoryError, "libfsdp could not share " + std::to_string(bytes) + " bytes of memory");
  return block;
}

void HostMemory::give_back(Block block) {
  if (!heap_->is_own()) return;
  // Large blocks are freed: they are copies of data outside of the heap, and may be as large as a gradient.
  constexpr std::int64_t kKept = std::int64_t{4} << 20;
  if (!block.memory || block.bytes > kKept) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.emplace(block.bytes, std::move(block.memory));
}

void HostMemory::keep_for_late_peers(c10::DataPtr mailbox) {
  constexpr std::size_t kMostKept = 256;  // rows later, no peer is still at this one
  if (!heap_->is_own()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_for_late_peers_.push_back(std::move(mailbox));
  if (kept_for_late_peers_.size() > kMostKept) kept_for_late_peers_.pop_front();
}

void HostMemory::wake_peers() {
  head().news.fetch_add(1, std::memory_order_release);
  wake_sleepers(head().news);
}

void HostMemory::ask_peers_to_advance() {
  head().requests.fetch_add(1, std::memory_order_release);
  wake_sleepers(head().requests);
}

void wake_sleepers(const std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool can_sleep_on_several() { return several.load(std::memory_order_relaxed); }

void sleep_on(const std::vector<WatchedWord>& words, std::int64_t microseconds) {
  if (words.empty() || sleep_on_all(words, microseconds)) return;
  constexpr std::int64_t kShort = 500;
  timespec limit{.tv_sec = 0, .tv_nsec = std::min(microseconds, kShort) * 1000};
  syscall(SYS_futex, words.front().word, FUTEX_WAIT, words.front().seen, &limit, nullptr, 0);
}

}  // namespace fsdp::comm
