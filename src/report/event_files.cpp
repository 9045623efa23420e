#include "report/event_files.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/classic_stream.h"
#include "events/event_file.h"
#include "events/process_stat.h"
#include "events/program_stack.h"
#include "fsdp/error.h"
#include "report/native_stack.h"

namespace fsdp::report {

namespace fs = std::filesystem;
using events::Event;
using events::EventMemory;
using events::EventWriter;

namespace {

constexpr std::int64_t kMostRanks = 1 << 20;  // More are a sign of damage.

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
  rank.events = memory->read();
  const auto in_time = [](const Event& a, const Event& b) { return a.time < b.time; };
  // Threads take their places one after the other, but the time before that.
  if (!std::is_sorted(rank.events.begin(), rank.events.end(), in_time)) std::stable_sort(rank.events.begin(), rank.events.end(), in_time);
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
  // The n-th communicator of a row on one rank belongs to the n-th on another one.
  std::map<std::string, int> rows;
  for (const auto& [source, name] : memory->sources()) {
    if (rank.sources.size() <= source) rank.sources.resize(source + 1);
    const std::string what(memory->text_of(name));
    rank.sources[source] = what + " #" + std::to_string(++rows[what]);
  }
  rank.process = process_of(rank.writer);
  return rank;
}

std::vector<fs::path> event_files_in(const fs::path& folder) {
  std::error_code failed;
  std::vector<fs::path> files;
  for (auto entry = fs::directory_iterator(folder, failed); !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    if (entry->path().extension() == ".events") files.push_back(entry->path());
  }
  if (failed) throw Error(folder.string() + ": " + failed.message());
  return files;
}

std::vector<RankEvents> read_all_events(const fs::path& folder, std::vector<std::string>& unreadable) {
  std::vector<RankEvents> ranks;
  for (const auto& file : event_files_in(folder)) {
    try {
      ranks.push_back(read_events(file));
    } catch (const Error& error) {
      unreadable.emplace_back(error.what());
    }
  }
  std::sort(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.writer.rank < b.writer.rank; });
  return ranks;
}

double processor_seconds(const EventWriter& writer) {
  if (!is_visible(writer)) return -1;
  const auto fields = events::process_stat(writer.process);
  constexpr std::size_t kUser = 11;  // clock ticks in the program; behind it, those in the system
  if (fields.size() <= kUser + 1) return -1;
  return (std::stod(fields[kUser]) + std::stod(fields[kUser + 1])) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::vector<std::string> lines_of_program(const fs::path& folder, const EventWriter& writer) {
  const auto path = folder / ("stack-" + std::to_string(writer.process) + ".txt");
  const auto read = [&] {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto before = read();
  int signal = 0;  // The file's first line is the signal's number.
  ClassicStream<std::istringstream>(before) >> signal;
  if (process_of(writer) != ProcessState::kRunning || signal < 1 || signal > SIGRTMAX || !handles(writer.process, signal)) return {};
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
