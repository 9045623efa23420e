#include "events/event_ring.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "base/process.h"
#include "events/event_memory.h"
#include "events/program_stack.h"

namespace fsdp::events {
namespace {

constexpr std::size_t kLongestError = 2048;

[[noreturn]] void throw_error(int number, const std::string& what) { throw std::system_error(number, std::generic_category(), what); }

/// Zeroed memory for events: of this process if `file` is -1, or that of a file. The system gives pages when they are first written.
EventMemory* map_memory(int file) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = mmap(nullptr, sizeof(EventMemory), PROT_READ | PROT_WRITE, flags, file, 0);
  if (memory == MAP_FAILED) throw_error(errno, "cannot map memory for events");
  return static_cast<EventMemory*>(memory);
}

/// The memory of events that is in use. One that was used before stays, as threads may still be writing to it.
class Memory {
 public:
  Memory() : now_(map_memory(-1)) { pthread_atfork(&before_fork, &after_fork, &begin_child); }

  static Memory& instance() {
    static Memory& memory = *new Memory();  // Never destroyed: threads may write events until the process ends.
    return memory;
  }

  EventMemory& now() { return *now_.load(std::memory_order_acquire); }
  std::mutex& mutex() { return mutex_; }

  /// Under the mutex.
  void move_to(EventMemory* file) {
    file->take_over(now());
    now_.store(file, std::memory_order_release);
    is_file_ = true;
  }

 private:
  static void before_fork() { instance().mutex_.lock(); }
  static void after_fork() { instance().mutex_.unlock(); }
  static void begin_child() {
    after_fork();
    instance().begin_again();
  }

  /// A forked process has events of its own, and not its parent's file; the numbers of names stay.
  void begin_again() {
    if (std::exchange(is_file_, false)) {
      EventMemory* const own = map_memory(-1);
      own->take_over_names(now());
      EventMemory* const parents = now_.exchange(own);
      munmap(parents, sizeof(EventMemory));
    } else {
      now().forget_until(now().written());
    }
  }

  std::atomic<EventMemory*> now_;
  bool is_file_ = false;  // Under the mutex.
  std::mutex mutex_;      // Held to add a name, describe a source, or move to other memory.
};

std::atomic<std::uint32_t> sources{0};
std::atomic<pid_t> ended{0};  ///< The process whose end is noted: a forked one has an end of its own.
std::atomic<bool> streams_are_measured{false};
std::atomic<pid_t> asked{0};  ///< The process that has looked at FSDP_EVENTS.

void end_by_signal(int signal) {
  record({.number = static_cast<std::uint64_t>(EndKind::kSignal), .kind = EventKind::kEnded});
  // The default action, as the flag SA_RESETHAND has brought it back.
  raise(signal);
}

/// Notes the ends that this process does not note itself. The program's own handlers stay.
void note_ends() {
  std::atexit([] { record_end(EndKind::kReturned); });
  struct sigaction now = {};
  if (sigaction(SIGTERM, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction noting = {};
  noting.sa_handler = &end_by_signal;
  noting.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  sigaction(SIGTERM, &noting, nullptr);
}

/// A new file that has all its blocks. Returns its descriptor.
int make_file(const std::filesystem::path& path) {
  std::filesystem::remove(path);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) throw_error(errno, "cannot make " + path.string());
  // Memory of a file whose block can't be found when it is written ends the process (SIGBUS).
  const int failed = posix_fallocate(file, 0, sizeof(EventMemory));
  if (failed == 0) return file;
  close(file);
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  throw_error(failed, "no room for " + std::to_string(sizeof(EventMemory)) + " bytes in " + path.string());
}

}  // namespace

void record(const Event& event) noexcept { Memory::instance().now().write(event); }

void note_alive() noexcept { Memory::instance().now().note_alive(); }

void record_end(EndKind end, std::string_view text) noexcept {
  const auto name = name_of(text.substr(0, kLongestError));
  if (ended.exchange(getpid()) == getpid()) return;
  record({.number = static_cast<std::uint64_t>(end), .operation = name, .kind = EventKind::kEnded});
}

std::vector<Event> recorded() { return Memory::instance().now().read(); }

void measure_streams() noexcept { streams_are_measured.store(true, std::memory_order_relaxed); }

bool measures_streams() noexcept { return streams_are_measured.load(std::memory_order_relaxed); }

std::uint32_t new_source(const std::string& what) {
  const auto source = sources.fetch_add(1, std::memory_order_relaxed) + 1;
  auto& memory = Memory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex());
  memory.now().describe_source(source, memory.now().add_name(what));
  return source;
}

std::map<std::uint32_t, std::string> described_sources() { return Memory::instance().now().sources(); }

std::uint32_t name_of(std::string_view text) {
  auto& memory = Memory::instance();
  if (const auto found = memory.now().find_name(text); found != 0 || text.empty()) return found;
  const std::lock_guard<std::mutex> lock(memory.mutex());
  return memory.now().add_name(text);
}

std::string_view text_of(std::uint32_t name) noexcept { return Memory::instance().now().text_of(name); }

void keep_in_file(const std::filesystem::path& folder, std::int64_t rank, std::int64_t world_size) {
  prepare_process();
  std::filesystem::create_directories(folder);
  const int file = make_file(file_of(folder, rank));
  EventMemory* next = nullptr;
  try {
    next = map_memory(file);
  } catch (...) {
    close(file);
    throw;
  }
  close(file);
  auto& memory = Memory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex());
  memory.move_to(next);
  next->sign(EventWriter::of_this_process(rank, world_size));  // From now on, it is a file of events.
}

void keep_in_file_if_asked(std::int64_t rank, std::int64_t world_size) noexcept {
  if (asked.exchange(getpid()) == getpid()) return;
  const auto folder = asked_folder();
  if (folder.empty()) return;
  try {
    keep_in_file(folder, rank, world_size);
    note_ends();
    write_stack_when_asked();
  } catch (const std::exception& error) {
    std::cerr << "libfsdp: rank " + std::to_string(rank) +
                     " keeps no events in a file, so `fsdp why` will not know of it: FSDP_EVENTS: " + error.what() + "\n"
              << std::flush;
  }
}

std::filesystem::path asked_folder() {
  const char* const folder = std::getenv("FSDP_EVENTS");
  return folder == nullptr ? "" : folder;
}

std::filesystem::path file_of(const std::filesystem::path& folder, std::int64_t rank) {
  return folder / ("rank-" + std::to_string(rank) + ".events");
}

}  // namespace fsdp::events
