#include "comm/collectives/wait_notice.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <thread>
#include <utility>

#include "events/event_file.h"
#include "events/event_ring.h"

namespace fsdp::comm {

using std::chrono::steady_clock;

namespace {

constexpr double kNoticeAfter = 30;  // s
// How often ranks look for questions of other hosts: often enough for a wait that is about to be reported.
constexpr std::chrono::milliseconds kShortestInterval{50};
constexpr std::chrono::milliseconds kLongestInterval{5000};

double patience() {
  static const double seconds = [] {
    const char* const asked = std::getenv("FSDP_WAIT_NOTICE");
    char* end = nullptr;
    const double number = asked == nullptr ? kNoticeAfter : std::strtod(asked, &end);
    return asked == nullptr || (end != asked && *end == '\0' && number >= 0) ? number : kNoticeAfter;
  }();
  return seconds;
}

double seconds_since(steady_clock::time_point time) { return std::chrono::duration<double>(steady_clock::now() - time).count(); }

}  // namespace

WaitNotice::WaitNotice(std::vector<std::int64_t> global_ranks, int rank, std::uint32_t source, std::shared_ptr<StoreProgress> progress)
    : global_ranks_(std::move(global_ranks)), rank_(rank), source_(source), progress_(std::move(progress)) {}

std::shared_ptr<StoreProgress> WaitNotice::progress_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank) {
  if (patience() <= 0) return nullptr;
  const auto half = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * patience() / 2));
  return std::make_shared<StoreProgress>(std::move(store), rank, std::clamp(half, kShortestInterval, kLongestInterval));
}

bool WaitNotice::is_due(Time since) { return patience() > 0 && seconds_since(since) >= patience(); }

void WaitNotice::tell(const std::shared_ptr<WaitNotice>& notice, int peer, Time since, const std::string& last_call) noexcept {
  try {
    const auto number = notice->own_wait().number;
    if (number != 0 && notice->told_.exchange(number) == number) return;
    // Other ranks' files may lie where reading takes long, and the wait must end when its message comes.
    std::thread([=] {
      try {
        const auto text = notice->text(peer, since, last_call);
        if (!text.empty()) std::cerr << text + "\n" << std::flush;
      } catch (...) {  // It would have been a help.
      }
    }).detach();
  } catch (...) {
  }
}

std::string WaitNotice::text(int peer, Time since, const std::string& last_call) const {
  const auto wait = own_wait();
  auto awaited = global_ranks_[static_cast<std::size_t>(peer)];
  std::map<std::int64_t, RankProgress> answers;
  const auto look = [&](std::int64_t rank) -> std::optional<RankProgress> {
    if (rank == global_ranks_[static_cast<std::size_t>(rank_)]) return std::nullopt;
    if (const auto answer = answers.find(rank); answer != answers.end()) return answer->second;
    return read_progress(rank);
  };
  auto found = look(awaited);
  if (!found && progress_ != nullptr) {
    answers = progress_->ask();
    if (own_wait().number != wait.number) return {};
    found = look(awaited);
  }
  const auto row = events::described_sources()[source_];
  // A peer may wait itself for one that has not come.
  for (const auto rank : global_ranks_) {
    if (found && !found->waits) break;
    auto other = look(rank);
    if (!other || other->waits || other->last_numbers[row] >= wait.number) continue;
    awaited = rank;
    found = std::move(other);
  }
  const auto name = "rank " + std::to_string(awaited);
  auto text = "libfsdp: rank " + std::to_string(global_ranks_[static_cast<std::size_t>(rank_)]) + " has been waiting for " + name +
              " for " + std::to_string(static_cast<std::int64_t>(seconds_since(since))) + " s" +
              (wait.text.empty() ? "" : ", in " + wait.text);
  const auto folder = events::asked_folder().string();
  const std::string way = folder.empty() ? ". With FSDP_EVENTS=FOLDER, `fsdp why FOLDER` prints " : ". `fsdp why " + folder + "` prints ";
  if (found) return text + "; " + name + " was last seen " + found->activity + way + "more.";
  if (!last_call.empty()) text += "; the last call of " + name + " was " + last_call;
  return text + (folder.empty() ? way + "what it is doing." : ". `fsdp why` prints what it is doing, with the files of its host.");
}

WaitNotice::OwnWait WaitNotice::own_wait() const {
  const events::RankReplay own(events::recorded());
  const auto* const open = own.awaited(source_);
  if (open == nullptr) return {};
  const auto& call = open->call;
  return {.number = call.number, .text = events::call_text(events::text_of(call.operation), events::text_of(call.unit))};
}

std::optional<RankProgress> WaitNotice::read_progress(std::int64_t rank) const {
  const auto folder = events::asked_folder();
  if (folder.empty()) return std::nullopt;
  const auto memory = std::make_unique<events::EventMemory>();
  try {
    events::read_file(events::file_of(folder, rank), *memory);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  const auto text_of = [&](std::uint32_t name) { return memory->text_of(name); };
  return progress_of(events::RankReplay(memory->read(), text_of), text_of, memory->sources());
}

}  // namespace fsdp::comm
