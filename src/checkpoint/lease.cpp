#include "checkpoint/lease.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/process.h"
#include "checkpoint/digits.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;
using std::chrono::system_clock;

// "fsdp-owner 1", then a line each: key, space, value. The stamp is the first, of a fixed width, so that it is renewed in place.
constexpr std::string_view kOwnerWords = "fsdp-owner 1\n";
constexpr std::string_view kRenewed = "renewed ";
constexpr std::size_t kStampDigits = 20;
constexpr std::int64_t kMostBytes = 4096;

std::int64_t nanoseconds(system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::string stamp(system_clock::time_point time) { return padded(static_cast<std::uint64_t>(nanoseconds(time)), kStampDigits); }

/// Returns a text that no other lease or process has.
std::string unique_token() { return random_digits() + random_digits(); }

/// Reads a file of /proc; empty if it does not exist.
std::string system_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Identifies the running kernel and the PID namespace (containers have their own). If they are unknown, each call returns another text.
std::string this_machine() {
  std::error_code error;
  const fs::path processes = fs::read_symlink("/proc/self/ns/pid", error);
  return error ? unique_token() : this_kernel() + "/" + processes.string();
}

/// When a process began, in the system's units; nothing if it has ended.
std::optional<std::string> start_of(pid_t process) {
  const std::string text = system_text("/proc/" + std::to_string(process) + "/stat");
  // "pid (name) state ...", where the name may hold anything; the start is the 20th field after the state.
  std::size_t at = text.rfind(')');
  if (at == std::string::npos || at + 2 >= text.size() || text[at + 2] == 'Z' || text[at + 2] == 'X') return std::nullopt;
  constexpr int kFieldsBefore = 20;
  for (int field = 0; field < kFieldsBefore && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  if (at == std::string::npos) return std::nullopt;
  return text.substr(at + 1, text.find(' ', at + 1) - at - 1);
}

/// The leases that this process holds.
class HeldLeases {
 public:
  void add(const std::string& token) {
    const std::lock_guard lock(mutex_);
    tokens_.insert(token);
  }
  void remove(const std::string& token) {
    const std::lock_guard lock(mutex_);
    tokens_.erase(token);
  }
  bool contains(const std::string& token) {
    const std::lock_guard lock(mutex_);
    return tokens_.contains(token);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> tokens_;
};

HeldLeases& held_leases() { return of_this_process<HeldLeases>(); }

/// The value of a line; empty if there is no such line.
std::string_view value_of(std::string_view text, const std::string& key) {
  const std::size_t line = text.find("\n" + key + " ");
  if (line == std::string_view::npos) return {};
  text.remove_prefix(line + key.size() + 2);
  return text.substr(0, text.find('\n'));
}

/// Whether the process that the text names still holds its lease; nothing if it runs elsewhere.
std::optional<bool> holds_here(std::string_view text) {
  if (value_of(text, "machine") != this_machine()) return std::nullopt;
  const auto process = number_in<pid_t>(value_of(text, "process"));
  if (!process) return std::nullopt;
  if (*process == ::getpid()) return held_leases().contains(std::string(value_of(text, "token")));
  if (::kill(*process, 0) != 0 && errno == ESRCH) return false;
  const std::optional<std::string> start = start_of(*process);
  return start && *start == value_of(text, "started");
}

/// Returns the text of an owner file; empty if it is not readable, or none.
std::string owner_text(const fs::path& path, FileSystem& files) {
  try {
    std::string text = read_whole(path, kMostBytes, files);
    const bool is_one =
        text.starts_with(kOwnerWords) && number_in<std::int64_t>(value_of(text, "renewed")) && !value_of(text, "token").empty();
    return is_one ? text : "";
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

struct Lease::Renewal {
  Renewal(const fs::path& folder, FileSystem& files, LeaseTimes times, std::string_view name) : file(File::create(folder / name, files)) {
    char host[256] = "";
    ::gethostname(host, sizeof(host) - 1);
    const pid_t process = ::getpid();
    const std::string text = std::string(kOwnerWords) + std::string(kRenewed) + stamp(system_clock::now()) + "\nhost " + host +
                             "\nmachine " + this_machine() + "\nprocess " + std::to_string(process) + "\nstarted " +
                             start_of(process).value_or("") + "\ntoken " + token + "\n";
    held_leases().add(token);
    try {
      file.write_at(0, text);
    } catch (const Error&) {
      held_leases().remove(token);
      throw;
    }
    thread = std::thread([this, times] { run(times); });
  }
  ~Renewal() {
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
    held_leases().remove(token);
  }
  Renewal(const Renewal&) = delete;
  Renewal& operator=(const Renewal&) = delete;

  void run(LeaseTimes times) {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, times.renewed, [this] { return ends; })) {
      try {
        // The file stays open, because the folder gets other names.
        file.write_at(static_cast<std::int64_t>(kOwnerWords.size() + kRenewed.size()), stamp(system_clock::now()));
      } catch (const Error&) {
        // The next one may succeed.
      }
    }
  }

  const std::string token = unique_token();
  File file;
  std::thread thread;  // a writer may be within one call for minutes
  std::mutex mutex;
  std::condition_variable changed;
  bool ends = false;
};

Lease::Lease(const fs::path& folder, FileSystem& files, LeaseTimes times, std::string_view name)
    : renewal_(std::make_unique<Renewal>(folder, files, times, name)) {}
Lease::~Lease() = default;
Lease::Lease(Lease&&) noexcept = default;
Lease& Lease::operator=(Lease&&) noexcept = default;

std::string this_kernel() {
  std::string boot = system_text("/proc/sys/kernel/random/boot_id");
  std::erase(boot, '\n');
  return boot.empty() ? unique_token() : boot;
}

Owner owner_of(const fs::path& folder, FileSystem& files, LeaseTimes times, system_clock::time_point now, std::string_view name) {
  const std::string text = owner_text(folder / name, files);
  if (text.empty()) return Owner::kUnknown;
  const std::optional<bool> holds = holds_here(text);
  if (holds && *holds) return Owner::kWriting;
  const auto lasts = holds ? times.after_process : times.lasts;
  return lasts && nanoseconds(now - *lasts) < number_in<std::int64_t>(value_of(text, "renewed")) ? Owner::kWriting : Owner::kGone;
}

std::string holder_here(const fs::path& folder, std::string_view name, FileSystem& files) {
  const std::string text = owner_text(folder / name, files);
  return holds_here(text).value_or(false) ? "process " + std::string(value_of(text, "process")) : "";
}

}  // namespace fsdp::ckpt
