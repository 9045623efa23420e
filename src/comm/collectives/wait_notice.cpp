#include "comm/collectives/wait_notice.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <utility>

#include "events/event_file.h"
#include "events/event_ring.h"
#include "events/whereabouts.h"

namespace fsdp::comm {

using events::Event;
using events::EventKind;
using std::chrono::steady_clock;

namespace {

constexpr double kNoticeAfter = 30;  // s

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

struct WaitNotice::Peer {
  std::uint64_t last_number = 0;  ///< Of its calls in the row.
  bool waits = false;             ///< For any collective.
  std::string activity;           ///< "in backward of 'blocks.5'".
};

WaitNotice::WaitNotice(std::vector<std::int64_t> global_ranks, int rank, std::string row_name, std::uint32_t source)
    : global_ranks_(std::move(global_ranks)), rank_(rank), row_name_(std::move(row_name)), source_(source) {}

bool WaitNotice::is_due(Time since) { return patience() > 0 && seconds_since(since) >= patience(); }

void WaitNotice::tell(const std::shared_ptr<WaitNotice>& notice, int peer, Time since, const std::string& last_call) noexcept {
  try {
    const auto number = notice->own_wait().number;
    if (number != 0 && notice->told_.exchange(number) == number) return;
    // Other ranks' files may lie where reading takes long, and the wait must end when its message comes.
    std::thread([=] {
      try {
        std::cerr << notice->text(peer, since, last_call) + "\n" << std::flush;
      } catch (...) {  // It would have been a help.
      }
    }).detach();
  } catch (...) {
  }
}

std::string WaitNotice::text(int peer, Time since, const std::string& last_call) const {
  const auto wait = own_wait();
  auto awaited = global_ranks_[static_cast<std::size_t>(peer)];
  Peer found;
  bool is_known = look_up(awaited, found);
  // A peer may wait itself for one that has not come.
  for (const auto rank : global_ranks_) {
    Peer other;
    if ((is_known && !found.waits) || !look_up(rank, other)) continue;
    if (other.waits || other.last_number >= wait.number) continue;
    awaited = rank;
    found = std::move(other);
    is_known = true;
  }
  const auto name = "rank " + std::to_string(awaited);
  auto text = "libfsdp: rank " + std::to_string(global_ranks_[static_cast<std::size_t>(rank_)]) + " has been waiting for " + name +
              " for " + std::to_string(static_cast<std::int64_t>(seconds_since(since))) + " s" +
              (wait.text.empty() ? "" : ", in " + wait.text);
  const auto folder = events::asked_folder().string();
  if (is_known) return text + "; " + name + " was last seen " + found.activity + ". `fsdp why " + folder + "` tells more.";
  if (!last_call.empty()) text += "; the last call of " + name + " was " + last_call;
  return text + (folder.empty() ? ". With FSDP_EVENTS=FOLDER, `fsdp why FOLDER` tells what it is doing."
                                : ". `fsdp why` tells what it is doing, with the files of its host.");
}

WaitNotice::OwnWait WaitNotice::own_wait() const {
  const Event* open = nullptr;
  const auto all = events::recorded();
  for (const auto& event : all) {
    if (event.source != source_) continue;
    if (event.kind == EventKind::kWaitBegan) open = &event;
    if (open != nullptr && event.number == open->number && (event.kind == EventKind::kWaitEnded || event.kind == EventKind::kFailed))
      open = nullptr;
  }
  if (open == nullptr) return {};
  return {.number = open->number,
          .text = "the " + std::string(events::text_of(open->operation)) + events::of_unit_text(events::text_of(open->unit))};
}

/// False if it is not known.
bool WaitNotice::look_up(std::int64_t rank, Peer& peer) const {
  const auto folder = events::asked_folder();
  if (folder.empty() || rank == global_ranks_[static_cast<std::size_t>(rank_)]) return false;
  const auto memory = std::make_unique<events::EventMemory>();
  try {
    events::read_file(events::file_of(folder, rank), *memory);
  } catch (const std::exception&) {
    return false;
  }
  const auto sources = memory->sources();
  const auto is_row = [&](std::uint32_t source) {
    return std::any_of(sources.begin(), sources.end(),
                       [&](const auto& known) { return known.first == source && memory->text_of(known.second) == row_name_; });
  };
  events::Whereabouts whereabouts;
  int waits = 0;
  const auto all = memory->read();
  for (const auto& event : all) {
    whereabouts.take(event);
    if (event.kind == EventKind::kWaitBegan) ++waits;
    if (event.kind == EventKind::kWaitEnded || event.kind == EventKind::kFailed) waits = std::max(waits - 1, 0);
    if (event.kind == EventKind::kPosted && is_row(event.source)) peer.last_number = event.number;
  }
  peer.waits = waits > 0;
  peer.activity = whereabouts.describe(memory->text_of(whereabouts.unit()));
  return true;
}

}  // namespace fsdp::comm
