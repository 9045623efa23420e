// fsdp why: why the ranks of a run wait, or have ended.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/printable.h"
#include "events/event_file.h"
#include "fsdp/error.h"
#include "report/event_files.h"
#include "report/flight_recorder.h"
#include "report/why.h"
#include "subcommands.h"

namespace fsdp::tools {
namespace {

namespace fs = std::filesystem;
using report::RankNow;

/// The ranks of a folder, as they are now.
class Ranks {
 public:
  explicit Ranks(const fs::path& folder) : files_(report::event_files_in(folder)) {
    std::vector<std::thread> readers;
    for (unsigned i = 1; i < std::min(std::thread::hardware_concurrency(), kMostReaders) && i < files_.size(); ++i) {
      readers.emplace_back([this] { read(); });
    }
    read();
    for (auto& reader : readers) reader.join();
  }

  /// Finds out which of them move, if there are some that can.
  void look_again() {
    const auto runs = [](const RankNow& rank) { return rank.process == report::ProcessState::kRunning; };
    if (std::none_of(now_.begin(), now_.end(), runs)) return;
    const auto begin = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(kBetweenLooks);
    for (std::size_t i = 0; i < now_.size(); ++i) {
      if (!runs(now_[i])) continue;
      now_[i].moves = events::written_to(seen_[i].file) > seen_[i].written;
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      const auto used = report::processor_seconds(now_[i].writer);
      if (used >= 0 && seen_[i].processor_seconds >= 0) now_[i].processors = (used - seen_[i].processor_seconds) / passed.count();
    }
  }

  const std::vector<RankNow>& now() const { return now_; }
  const std::vector<std::string>& unreadable() const { return unreadable_; }

  const events::EventWriter& writer_of(std::int64_t number) const {
    return std::find_if(now_.begin(), now_.end(), [&](const RankNow& rank) { return rank.rank() == number; })->writer;
  }

 private:
  static constexpr std::chrono::milliseconds kBetweenLooks{300};
  static constexpr unsigned kMostReaders = 8;
  static constexpr std::size_t kReadEvents = 4096;  // A rank that waits, or has stopped, writes no more of them.

  /// Reads files until there are no more. Several threads do so.
  void read() {
    for (std::size_t i = next_++; i < files_.size(); i = next_++) {
      try {
        const auto events = report::read_events(files_[i], kReadEvents);
        RankNow now(events);
        const auto processor_seconds = report::processor_seconds(events.writer);
        const std::lock_guard<std::mutex> lock(mutex_);
        seen_.push_back({.file = files_[i], .written = events.written, .processor_seconds = processor_seconds});
        now_.push_back(std::move(now));
      } catch (const Error& error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        unreadable_.emplace_back(error.what());
      }
    }
  }

  struct Seen {
    fs::path file;
    std::uint64_t written;
    double processor_seconds;
  };

  const std::vector<fs::path> files_;
  std::atomic<std::size_t> next_{0};  ///< Of the files, not yet read.
  std::mutex mutex_;                  ///< Of what follows, while files are read.
  std::vector<Seen> seen_;
  std::vector<RankNow> now_;
  std::vector<std::string> unreadable_;
};

int why(const fs::path& folder, const fs::path& flight_recorder) {
  Ranks ranks(folder);
  ranks.look_again();
  if (ranks.now().empty() && !ranks.unreadable().empty()) throw Error(ranks.unreadable().front());
  const auto why = report::explain(ranks.now(), [&](std::int64_t rank) { return report::lines_of_program(folder, ranks.writer_of(rank)); });
  if (!flight_recorder.empty()) report::write_flight_recorder(ranks.now(), flight_recorder);
  std::cout << ckpt::printable(why.text) << "\n";
  for (const auto& line : ranks.unreadable()) std::cout << "Not read: " << ckpt::printable_line(line) << "\n";
  return why.cause == report::Cause::kNothing || why.cause == report::Cause::kSlow ? 0 : kFound;
}

}  // namespace

std::function<int()> add_why(CLI::App& command) {
  auto folder = std::make_shared<std::string>();
  auto flight_recorder = std::make_shared<std::string>();
  command.add_option("folder", *folder, "The value of FSDP_EVENTS with which the ranks were started")->required();
  command.add_option("--flight-recorder", *flight_recorder,
                     "A folder for the ranks' calls in c10d's format: python -m torch.distributed.flight_recorder.fr_trace FOLDER");
  return [=] { return why(*folder, *flight_recorder); };
}

}  // namespace fsdp::tools
