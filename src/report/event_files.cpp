#include "report/event_files.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/classic_stream.h"
#include "base/text.h"
#include "events/event_file.h"
#include "events/process_stat.h"
#include "events/program_stack.h"
#include "fsdp/error.h"
#include "report/native_stack.h"

namespace fsdp::report {

namespace fs = std::filesystem;
using events::EventMemory;
using events::EventWriter;

namespace {

constexpr std::int64_t kMostRanks = 1 << 20;  // More are a sign of damage.
/// Ranks of one run make their files when they have met. A rank whose last event is so much older than another one's file is of another
/// run.
constexpr std::int64_t kBetweenRuns = 60'000'000'000;  // ns

/// A word of /proc/PID/status, such as the letter after "State:".
std::string status_of(std::int64_t process, const std::string& key) {
  std::ifstream file("/proc/" + std::to_string(process) + "/status");
  std::string word;
  while (file >> word) {
    if (word == key && file >> word) return word;
  }
  return {};
}

/// The processes that can be seen from here, and the clock.
struct Here {
  std::uint64_t processes = events::processes_id();
  std::uint64_t clock = events::clock_id();
};
const Here& here() {
  static const Here here;
  return here;
}

bool is_visible(const EventWriter& writer) { return writer.processes == here().processes && writer.clock == here().clock; }

ProcessState process_of(const EventWriter& writer) {
  if (!is_visible(writer)) return ProcessState::kElsewhere;
  const auto state = status_of(writer.process, "State:");
  if (state.empty() || state == "Z" || state == "X") return ProcessState::kDead;
  if (events::began(writer.process) != writer.process_began) return ProcessState::kDead;
  if (const auto tracer = status_of(writer.process, "TracerPid:"); !tracer.empty() && tracer != "0") return ProcessState::kDebugged;
  return state == "T" || state == "t" ? ProcessState::kStopped : ProcessState::kRunning;
}

/// Whether the process has a handler for the signal. Without one, the signal would end it.
bool handles(std::int64_t process, int signal) {
  const auto mask = status_of(process, "SigCgt:");
  return !mask.empty() && (std::stoull(mask, nullptr, 16) >> (signal - 1) & 1U) != 0;
}

/// The lines "File ..." that Python's faulthandler has written of the main thread, which comes last; the outermost first.
std::vector<std::string> lines_of_main_thread(const std::string& stack) {
  const auto main_thread = stack.rfind("most recent call first");
  std::vector<std::string> places;
  if (main_thread == std::string::npos) return places;
  ClassicStream<std::istringstream> lines(stack.substr(main_thread));
  for (std::string line; std::getline(lines, line);) {
    if (const auto begin = line.find("File "); begin != std::string::npos) places.push_back(line.substr(begin));
  }
  std::reverse(places.begin(), places.end());
  return places;
}

}  // namespace

RankEvents read_events(const fs::path& path, std::size_t most_events) {
  // Two megabytes, which thousands of files use one after the other.
  thread_local const auto memory = std::make_unique<EventMemory>();
  try {
    events::read_file(path, *memory, most_events);
  } catch (const std::runtime_error& error) {
    throw Error(error.what());
  }
  RankEvents rank;
  rank.writer = memory->writer();
  rank.writer.host.back() = '\0';
  if (rank.writer.rank < 0 || rank.writer.world_size > kMostRanks || rank.writer.rank >= rank.writer.world_size) {
    throw Error(path.string() + ": a file of events of rank " + std::to_string(rank.writer.rank) + " of " +
                std::to_string(rank.writer.world_size) + ", which is damaged");
  }
  rank.written = memory->written();
  rank.alive = memory->alive();
  rank.file = path;
  rank.events = memory->read();
  rank.names = {""};
  std::vector<std::uint32_t> places;  // by the file's number of a name
  const auto place_of = [&](std::uint32_t name) {
    if (name == 0 || name > EventMemory::kHighestName) return std::uint32_t{0};
    if (places.size() <= name) places.resize(name + 1);
    auto& place = places[name];
    if (place == 0) {
      place = static_cast<std::uint32_t>(rank.names.size());
      rank.names.emplace_back(memory->text_of(name));
    }
    return place;
  };
  for (auto& event : rank.events) {
    event.unit = place_of(event.unit);
    event.operation = place_of(event.operation);
  }
  for (const auto& [source, what] : memory->sources()) {
    rank.sources.resize(source + 1);
    rank.sources[source] = what;
  }
  rank.process = process_of(rank.writer);
  return rank;
}

namespace {

/// The last events of the files of a folder. Several threads read, as there may be thousands of files.
class Reader {
 public:
  Reader(const fs::path& folder, std::size_t most_events) : most_events_(most_events) {
    std::error_code failed;
    for (auto entry = fs::directory_iterator(folder, failed); !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
      if (entry->path().extension() == ".events") files_.push_back(entry->path());
    }
    if (failed) throw Error(folder.string() + ": " + failed.message());
    std::vector<std::thread> others;
    for (unsigned i = 1; i < std::min(std::thread::hardware_concurrency(), kMostThreads) && i < files_.size(); ++i) {
      others.emplace_back([this] { read(); });
    }
    read();
    for (auto& thread : others) thread.join();
    std::sort(run_.ranks.begin(), run_.ranks.end(), [](const auto& a, const auto& b) { return a.writer.rank < b.writer.rank; });
  }

  Run take() { return std::move(run_); }

 private:
  static constexpr unsigned kMostThreads = 8;

  void read() {
    for (std::size_t i = next_++; i < files_.size(); i = next_++) {
      try {
        auto rank = read_events(files_[i], most_events_);
        const std::lock_guard<std::mutex> lock(mutex_);
        run_.ranks.push_back(std::move(rank));
      } catch (const Error& error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        run_.left_out.emplace_back(error.what());
      }
    }
  }

  const std::size_t most_events_;
  std::vector<fs::path> files_;
  std::atomic<std::size_t> next_{0};  ///< Of the files, not yet read.
  std::mutex mutex_;
  Run run_;  ///< Under the mutex while files are read.
};

/// Seconds of processors that a process has used so far; -1 if it can't be seen.
double processor_seconds(const EventWriter& writer) {
  if (!is_visible(writer)) return -1;
  const auto fields = events::process_stat(writer.process);
  constexpr std::size_t kUser = 11;  // clock ticks in the program; behind it, those in the system
  if (fields.size() <= kUser + 1) return -1;
  return (std::stod(fields[kUser]) + std::stod(fields[kUser + 1])) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

/// Finds out which ranks move, if there are some that can. Ranks that wait for the process that looks do not.
void look_again(std::vector<RankEvents>& ranks) {
  constexpr std::chrono::milliseconds kBetweenLooks{300};
  const auto runs = [](const RankEvents& rank) { return rank.process == ProcessState::kRunning; };
  const auto is_this = [](const RankEvents& rank) { return lives(rank) && rank.writer.process == getpid(); };
  if (std::none_of(ranks.begin(), ranks.end(), runs) || std::any_of(ranks.begin(), ranks.end(), is_this)) return;
  std::vector<double> before;
  for (const auto& rank : ranks) before.push_back(processor_seconds(rank.writer));
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(kBetweenLooks);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& rank = ranks[i];
    if (!runs(rank)) continue;
    rank.moves = events::written_to(rank.file) > rank.written;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    const auto used = processor_seconds(rank.writer);
    if (used >= 0 && before[i] >= 0) rank.processors = (used - before[i]) / passed.count();
  }
}

/// The file in memory to which a process writes its stacks; empty if it has none.
fs::path stack_file_of(std::int64_t process) {
  const auto link = std::string("/memfd:").append(events::kStackFile);
  std::error_code failed;
  for (auto entry = fs::directory_iterator("/proc/" + std::to_string(process) + "/fd", failed);
       !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    std::error_code gone;
    if (fs::read_symlink(entry->path(), gone).string().starts_with(link)) return entry->path();
  }
  return {};
}

}  // namespace

Run read_run(const fs::path& folder, std::size_t most_events) {
  auto run = Reader(folder, most_events).take();
  if (run.ranks.empty() && !run.left_out.empty()) throw Error(run.left_out.front());
  if (const auto earlier = drop_earlier_runs(run.ranks); !earlier.empty())
    run.left_out.push_back("files of " + names_of_ranks(earlier) + ", which an earlier run has left");
  look_again(run.ranks);
  return run;
}

std::vector<std::int64_t> drop_earlier_runs(std::vector<RankEvents>& ranks) {
  if (ranks.empty()) return {};
  const auto made = [](const RankEvents& rank) { return rank.writer.made + rank.writer.ahead_of_epoch; };
  const auto& last_made = *std::max_element(ranks.begin(), ranks.end(), [&](const auto& a, const auto& b) { return made(a) < made(b); });
  const auto newest = made(last_made);
  const auto world_size = last_made.writer.world_size;
  std::vector<std::int64_t> earlier;
  std::erase_if(ranks, [&](const RankEvents& rank) {
    const auto last = rank.events.empty() ? made(rank) : rank.events.back().time + rank.writer.ahead_of_epoch;
    if (rank.writer.world_size == world_size && std::max(made(rank), last) >= newest - kBetweenRuns) return false;
    earlier.push_back(rank.writer.rank);
    return true;
  });
  return earlier;
}

bool lives(const RankEvents& rank) { return rank.process != ProcessState::kDead && rank.process != ProcessState::kElsewhere; }

std::vector<std::string> lines_of_program(const EventWriter& writer) {
  if (process_of(writer) != ProcessState::kRunning) return {};
  const auto path = stack_file_of(writer.process);
  const auto read = [&] {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto before = read();
  int signal = 0;  // The file's first line is the signal's number.
  ClassicStream<std::istringstream>(before) >> signal;
  if (signal < 1 || signal > SIGRTMAX || !handles(writer.process, signal)) return {};
  if (kill(static_cast<pid_t>(writer.process), signal) != 0) return {};
  constexpr auto kPatience = std::chrono::seconds(1);
  constexpr auto kBetween = std::chrono::milliseconds(10);
  std::string text;
  for (const auto end = std::chrono::steady_clock::now() + kPatience; std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(kBetween);
    auto now = read();
    now.erase(0, before.size());
    // It is written line by line, and may come in parts.
    if (!now.empty() && now == text && (!now.starts_with(events::kNativeStack) || now.find(events::kEndOfStack) != std::string::npos))
      break;
    text = std::move(now);
  }
  return text.find(events::kNativeStack) == std::string::npos ? lines_of_main_thread(text) : lines_of_native_stack(text, writer.process);
}

}  // namespace fsdp::report
