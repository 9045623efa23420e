#include "report/rank_now.h"

#include <algorithm>

#include "events/row_name.h"

namespace fsdp::report {

using events::Event;
using events::EventKind;

namespace {

/// More than a rank can be ahead of another one (SharedRow::kCalls), so that the last calls that all have made are among them.
constexpr std::size_t kKeptCalls = 512;

}  // namespace

/// What events say of one source; by its number, as there are many events.
struct RankNow::OfSource {
  const std::string* name = nullptr;
  bool is_row = false;
  std::vector<PostedCall> calls;
  std::vector<std::pair<std::uint64_t, std::int64_t>> waits;  // numbers, and since when
};

RankNow::RankNow(const RankEvents& rank) : writer(rank.writer), process(rank.process), names_(rank.names) {
  static const std::string kNoName;
  std::vector<OfSource> sources(rank.sources.size() + 1);
  for (std::size_t i = 0; i < rank.sources.size(); ++i) {
    sources[i].name = &rank.sources[i];
    sources[i].is_row = !events::ranks_of_row(rank.sources[i]).empty();
  }
  sources.back().name = &kNoName;
  for (const auto& event : rank.events) take(event, sources[std::min<std::size_t>(event.source, rank.sources.size())]);
  for (auto& source : sources) {
    if (!source.is_row) continue;
    rows_[*source.name] = std::move(source.calls);
    for (const auto& [number, since] : source.waits) waits.emplace(RowNumber{*source.name, number}, since);
  }
  pass = whereabouts_.pass();
}

void RankNow::take(const Event& event, OfSource& source) {
  const auto time = event.time + writer.ahead_of_epoch;
  const auto text = [&] { return event.operation < names_.size() ? names_[event.operation] : std::string(); };
  auto& calls = source.calls;
  last_event = time;
  switch (event.kind) {
    case EventKind::kPosted: {
      // Threads may come to the ring in another order than to the row.
      const auto before = std::find_if(calls.rbegin(), calls.rend(), [&](const PostedCall& call) { return call.number < event.number; });
      calls.insert(before.base(),
                   {.number = event.number, .operation = event.operation, .unit = event.unit, .bytes = event.bytes, .time = time});
      if (calls.size() > 2 * kKeptCalls) calls.erase(calls.begin(), calls.end() - kKeptCalls);
      last_move = time;
      break;
    }
    case EventKind::kWaitBegan:
      source.waits.emplace_back(event.number, time);
      break;
    case EventKind::kWaitEnded:
    case EventKind::kFailed:
      std::erase_if(source.waits, [&](const auto& wait) { return wait.first == event.number; });
      for (auto call = calls.rbegin(); call != calls.rend() && call->number >= event.number; ++call) {
        if (call->number == event.number) call->done = true;
      }
      if (event.kind == EventKind::kFailed && source.is_row) fail({.time = time, .text = {}, .in = RowNumber{*source.name, event.number}});
      break;
    case EventKind::kGivenUp:
      if (source.is_row) fail({.time = time, .text = text(), .in = RowNumber{*source.name, 0}});
      break;
    case EventKind::kEnded:
      if (end) break;
      end = static_cast<events::EndKind>(event.number);
      if (end == events::EndKind::kException) fail({.time = time, .text = text(), .in = {}});
      break;
    case EventKind::kStepBegan:
      failure.reset();  // It has gone on.
      [[fallthrough]];
    case EventKind::kEntered:
    case EventKind::kBackwardBegan:
    case EventKind::kBackwardEnded:
      whereabouts_.take(event);
      last_move = time;
      break;
    case EventKind::kArrived:
    case EventKind::kHeldStream:
    case EventKind::kMemoryHeld:
    case EventKind::kMemoryPeaked:
    case EventKind::kKindPeaked:
      break;
  }
}

/// The first failure is the one that counts. Its row and its text come in two events, in either order; a failure without a text has that of
/// the exception that ends the program.
void RankNow::fail(Failure next) {
  if (!failure) {
    failure = std::move(next);
    return;
  }
  if (failure->text.empty() && (!next.in || !failure->in || next.in->row == failure->in->row)) failure->text = next.text;
  if (failure->in && next.in && failure->in->number == 0 && next.in->row == failure->in->row) failure->in->number = next.in->number;
}

const std::vector<PostedCall>& RankNow::calls(const std::string& row) const {
  static const std::vector<PostedCall> kNone;
  const auto found = rows_.find(row);
  return found == rows_.end() ? kNone : found->second;
}

const PostedCall* RankNow::call(const RowNumber& which) const {
  const auto& all = calls(which.row);
  const auto by_number = [](const PostedCall& call, std::uint64_t number) { return call.number < number; };
  const auto found = std::lower_bound(all.begin(), all.end(), which.number, by_number);
  return found == all.end() || found->number != which.number ? nullptr : &*found;
}

bool RankNow::has_called(const RowNumber& which) const {
  const auto& all = calls(which.row);
  return !all.empty() && all.back().number >= which.number;
}

std::string RankNow::text_of(const PostedCall& call) const {
  const auto& operation = operation_of(call);
  return (operation.empty() ? "a collective" : "the " + operation) + events::of_unit_text(unit_of(call));
}

bool RankNow::are_alike(const PostedCall& call, const RankNow& other, const PostedCall& others) const {
  return call.bytes == others.bytes && operation_of(call) == other.operation_of(others) && unit_of(call) == other.unit_of(others);
}

std::string RankNow::activity() const {
  const auto unit = whereabouts_.unit();
  return whereabouts_.describe(unit < names_.size() ? names_[unit] : std::string());
}

}  // namespace fsdp::report
