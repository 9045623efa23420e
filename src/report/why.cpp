#include "report/why.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "events/row_name.h"
#include "fsdp/error.h"
#include "report/native_stack.h"

namespace fsdp::report {

using events::EndKind;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr double kComputes = 0.5;  // processors

std::string seconds(std::int64_t ns) {
  const auto number = static_cast<double>(std::max<std::int64_t>(ns, 0)) / static_cast<double>(kSecond);
  return with_decimals(number, number < 10 ? 2 : number < 100 ? 1 : 0) + " s";
}

std::string capital(std::string text) {
  if (text.starts_with("rank")) text.front() = 'R';
  return text;
}

/// The line that is not of an installed package, if there is one, and the innermost.
std::string place_in(const std::vector<std::string>& lines) {
  if (lines.empty()) return {};
  const auto is_own = [](const std::string& line) {
    return line.find("site-packages") == std::string::npos && line.find("/lib/python") == std::string::npos &&
           line.find("File \"<") == std::string::npos && is_of_program(line);
  };
  const auto own = std::find_if(lines.rbegin(), lines.rend(), is_own);
  if (own == lines.rend() || own == lines.rbegin()) return lines.back();
  return *own + ", in " + lines.back();
}

bool is_in_data_loader(const std::vector<std::string>& lines) {
  return std::any_of(lines.begin(), lines.end(),
                     [](const std::string& line) { return line.find("/torch/utils/data/") != std::string::npos; });
}

/// All ranks together.
class Diagnosis {
 public:
  Diagnosis(const std::vector<RankNow>& ranks, const LinesOf& lines_of) : lines_of_(lines_of) {
    for (const auto& rank : ranks) {
      ranks_.emplace(rank.rank(), &rank);
      latest_ = std::max(latest_, rank.last_sign);
      for (const auto& [row, calls] : rank.rows()) members_.try_emplace(row);
      for (const auto& [which, since] : rank.waits) waiting_[which].push_back(rank.rank());
      if (rank.failure && rank.failure->in) failed_[*rank.failure->in].push_back(rank.rank());
    }
    for (auto& [row, members] : members_) {
      members = events::ranks_of_row(row);
      auto& known = known_members_[row];
      std::copy_if(members.begin(), members.end(), std::back_inserter(known), [&](std::int64_t rank) { return ranks_.contains(rank); });
    }
    for (std::int64_t rank = 0; rank < ranks.front().left.writer.world_size; ++rank) {
      if (!ranks_.contains(rank)) missing_.push_back(rank);
    }
  }

  Why make() const {
    auto why = cause();
    if (!missing_.empty() && why.cause != Cause::kNoFile) why.text += " There is no file of " + names_of_ranks(missing_) + ".";
    return why;
  }

 private:
  Why cause() const {
    if (auto why = other_call()) return *why;
    if (auto why = dead()) return *why;
    if (auto why = first_failure()) return *why;
    if (auto why = late_member()) return *why;
    if (auto why = stuck_collective()) return *why;
    if (auto why = each_other()) return *why;
    return {.cause = Cause::kNothing, .rank = -1, .text = "No rank waits for another one, and none has failed."};
  }

  const RankNow& at(std::int64_t rank) const { return *ranks_.at(rank); }

  /// The members of a row of which there are files.
  const std::vector<std::int64_t>& known_members(const std::string& row) const { return known_members_.at(row); }

  // --- Ranks that have made different calls.

  /// The first number of a row with which two ranks have made different calls; 0: none.
  std::uint64_t first_difference(const std::string& row, const std::vector<std::int64_t>& members) const {
    std::uint64_t first = 0;
    std::unordered_map<std::uint64_t, std::pair<const RankNow*, const Collective*>> reference;
    for (const auto member : members) {
      const auto& rank = at(member);
      for (const auto* call : rank.calls(row)) {
        const auto number = call->call.number;
        if (first != 0 && number >= first) break;
        const auto [known, is_new] = reference.try_emplace(number, &rank, call);
        if (!is_new && !rank.are_alike(*call, *known->second.first, *known->second.second)) first = number;
      }
    }
    return first;
  }

  std::optional<Why> other_call() const {
    for (const auto& [row, all] : members_) {
      const auto& members = known_members(row);
      const auto number = first_difference(row, members);
      if (number == 0) continue;
      const RowNumber which{row, number};
      // Those that have made the same call, the largest group first.
      std::vector<std::vector<std::int64_t>> groups;
      for (const auto rank : members) {
        const auto* const call = at(rank).call(which);
        if (call == nullptr) continue;
        const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
          return at(rank).are_alike(*call, at(group.front()), *at(group.front()).call(which));
        });
        (same == groups.end() ? groups.emplace_back() : *same).push_back(rank);
      }
      std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
      return of_groups(which, groups);
    }
    return {};
  }

  Why of_groups(const RowNumber& which, const std::vector<std::vector<std::int64_t>>& groups) const {
    const auto text = [&](const std::vector<std::int64_t>& group) {
      const auto& call = *at(group.front()).call(which);
      const auto others = &group == &groups.front() ? groups.back().front() : groups.front().front();
      const auto& other = *at(others).call(which);
      auto told = at(group.front()).text_of(call);
      if (told == at(others).text_of(other)) told += " of " + std::to_string(call.call.bytes) + " bytes";
      return told;
    };
    const auto& usual = groups.front();
    const auto& odd = groups.back();
    const bool decided = odd.size() < usual.size();
    Why why{.cause = Cause::kOtherCall, .rank = decided && odd.size() == 1 ? odd.front() : -1, .text = {}};
    why.text = decided ? capital(names_of_ranks(odd)) + (odd.size() == 1 ? " is" : " are") + " in another call than the others: "
                       : "The ranks make different calls: ";
    why.text += names_of_ranks(odd) + (odd.size() == 1 ? " has called " : " have called ") + text(odd) + ", and " + names_of_ranks(usual) +
                (usual.size() == 1 ? " has called " : " have called ") + text(usual) + "." + last_common(which);
    if (why.rank >= 0) why.text += " " + capital(names_of_ranks({why.rank})) + " was last " + at(why.rank).activity() + ".";
    return with_place(std::move(why), why.rank >= 0 ? why.rank : odd.front());
  }

  // --- Ranks that have died or failed.

  static bool died_silently(const RankNow& rank) { return rank.left.process == ProcessState::kDead && !rank.end && !rank.failure; }

  /// The ranks without which others wait, or have failed.
  std::set<std::int64_t> needed() const {
    std::set<std::int64_t> found;
    for (const auto* const of_ranks : {&waiting_, &failed_}) {
      for (const auto& [which, ranks] : *of_ranks) {
        for (const auto member : known_members(which.row)) {
          if (ranks.size() == 1 && ranks.front() == member) continue;
          const auto* const call = at(member).call(which);
          if (which.number == 0 || !at(member).has_called(which) || (call != nullptr && !call->is_done())) found.insert(member);
        }
      }
    }
    return found;
  }

  std::optional<Why> dead() const {
    const RankNow* first = nullptr;
    bool first_is_needed = false;
    const auto all_needed = needed();
    const auto* const failed = first_failed();
    bool somebody_else = false;  // that lives, or has failed, so that not all were killed at once
    for (const auto& [number, rank] : ranks_) {
      if (!died_silently(*rank)) {
        somebody_else = somebody_else || rank->failure || rank->end == EndKind::kSignal || rank->left.process != ProcessState::kDead;
        continue;
      }
      if (failed != nullptr && failed->failure->time < rank->last_sign) continue;  // It has outlived the first cause.
      const bool is_needed = all_needed.contains(number);
      if (first == nullptr || std::tuple(!is_needed, rank->last_event) < std::tuple(!first_is_needed, first->last_event)) {
        first = rank;
        first_is_needed = is_needed;
      }
    }
    if (first == nullptr || !somebody_else) return {};
    const auto& writer = first->left.writer;
    return Why{.cause = Cause::kDead,
               .rank = first->rank(),
               .text = capital(names_of_ranks({first->rank()})) + " is dead: its process (" + std::to_string(writer.process) + " on " +
                       writer.host.data() +
                       ") has ended without reporting a reason, by a signal, a crash or _exit (`dmesg` shows whether the system was " +
                       "out of memory). It was " + first->activity() + seconds_ago(*first) + "." + waiting_text(*first)};
  }

  /// The time since its last event, if a process still lives whose time can be compared.
  std::string seconds_ago(const RankNow& dead) const {
    const bool counts = std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return lives(rank.second->left); });
    return counts ? ", " + seconds(latest_ - dead.last_event) + " ago" : std::string();
  }

  /// What others do about a rank that is dead.
  std::string waiting_text(const RankNow& dead) const {
    for (const auto& [number, rank] : ranks_) {
      if (rank == &dead) continue;
      if (rank->failure && rank->failure->in && rank->failure->in->number != 0) {
        return " " + capital(names_of_ranks({number})) + " has failed therefore in " + text_of(*rank->failure->in) + "." +
               last_common(*rank->failure->in);
      }
      if (!rank->waits.empty()) {
        const auto& which = rank->waits.begin()->first;
        return " " + capital(names_of_ranks({number})) + " waits in " + text_of(which) + "." + last_common(which);
      }
    }
    return {};
  }

  const RankNow* first_failed() const {
    const RankNow* first = nullptr;
    for (const auto& [number, rank] : ranks_) {
      if (rank->failure && (first == nullptr || rank->failure->time < first->failure->time)) first = rank;
    }
    return first;
  }

  std::optional<Why> first_failure() const {
    const auto* const first = first_failed();
    if (first == nullptr) return {};
    const auto& failure = *first->failure;
    if (failure.in && failure.in->number != 0) {
      // It may have failed because one of the others never came.
      for (const auto member : known_members(failure.in->row)) {
        const auto* const call = at(member).call(*failure.in);
        const bool came = call != nullptr ? call->posted <= failure.time : at(member).has_called(*failure.in);
        if (came || member == first->rank()) continue;
        auto why = not_arrived(member, *failure.in, {first->rank()});
        why.text += " " + capital(names_of_ranks({first->rank()})) + " has given up: " + failure.text;
        return why;
      }
    }
    const bool differ = failure.text.find("the ranks make different calls") != std::string::npos;
    Why why{.cause = differ ? Cause::kOtherCall : Cause::kFailed, .rank = differ ? -1 : first->rank(), .text = {}};
    why.text = capital(names_of_ranks({first->rank()})) + " has failed first";
    if (failure.in && failure.in->number != 0) why.text += ", in " + text_of(*failure.in);
    why.text += ", when it was " + first->activity() + (failure.text.empty() ? "." : ": " + failure.text);
    if (failure.in && failure.in->number != 0) why.text += last_common(*failure.in);
    return why;
  }

  // --- Ranks that wait.

  struct Late {
    RowNumber which;
    std::vector<std::int64_t> waiting;
  };

  /// Until when it is known to have done what it did last. A rank that computes gives no signs of life: those of its peers count.
  std::int64_t until(const RankNow& rank) const {
    return rank.left.process == ProcessState::kDead && (rank.end || !rank.waits.empty()) ? rank.last_sign : latest_;
  }

  static bool is_held(const RankNow& rank) {
    return rank.left.process == ProcessState::kStopped || rank.left.process == ProcessState::kDebugged;
  }

  /// A rank that others wait for, and that waits for no rank. If there are several, the one that has not moved for the longest time; but
  /// one that is stopped before all others.
  std::optional<Why> late_member() const {
    std::map<std::int64_t, Late> late;
    for (const auto& [which, waiting] : waiting_) {
      for (const auto member : known_members(which.row)) {
        const auto& other = at(member);
        if (!is_held(other) && (other.has_called(which) || !other.waits.empty())) continue;
        if (waiting.size() == 1 && waiting.front() == member) continue;
        auto& found = late[member];
        if (!found.waiting.empty()) continue;
        found.which = which;
        std::copy_if(waiting.begin(), waiting.end(), std::back_inserter(found.waiting), [&](std::int64_t rank) { return rank != member; });
      }
    }
    if (late.empty()) return {};
    const auto rank_of = [&](const auto& entry) {
      const auto& rank = at(entry.first);
      return std::tuple(!is_held(rank), rank.left.moves, rank.last_move);
    };
    const auto first = std::min_element(late.begin(), late.end(), [&](const auto& a, const auto& b) { return rank_of(a) < rank_of(b); });
    auto why = not_arrived(first->first, first->second.which, first->second.waiting);
    std::vector<std::int64_t> others;
    for (const auto& [rank, found] : late) {
      if (rank != first->first) others.push_back(rank);
    }
    if (!others.empty()) why.text += " Ranks also wait for " + names_of_ranks(others) + ".";
    return why;
  }

  /// The rank that `waiting` wait for.
  Why not_arrived(std::int64_t number, const RowNumber& which, const std::vector<std::int64_t>& waiting) const {
    const auto& rank = at(number);
    const auto name = capital(names_of_ranks({number}));
    const auto lines = lines_of(rank);
    const auto& first = at(waiting.front());
    Why why{.cause = Cause::kNotArrived, .rank = number, .text = {}};
    if (rank.left.process == ProcessState::kStopped) {
      why = {.cause = Cause::kStopped,
             .rank = number,
             .text = name + " is stopped (SIGSTOP, Ctrl-Z): `kill -CONT " + std::to_string(rank.left.writer.process) + "` on " +
                     rank.left.writer.host.data() + " continues it."};
    } else if (rank.left.process == ProcessState::kDebugged) {
      why = {.cause = Cause::kDebugged, .rank = number, .text = name + " is held by a debugger."};
    } else if (rank.end == EndKind::kException) {
      why = {.cause = Cause::kFailed, .rank = number, .text = name + " has failed: " + std::string(rank.text_of(rank.end_text)) + "."};
    } else if (rank.end == EndKind::kReturned || (rank.end && first.end != EndKind::kSignal)) {  // A launcher ends all of them.
      why = {.cause = Cause::kDead,
             .rank = number,
             .text = name + " has ended its program" + (rank.end == EndKind::kSignal ? ", as SIGTERM or Ctrl-C has asked it to" : "") +
                     ", which is too early: the others still need it."};
    } else if (rank.left.moves) {
      why = {.cause = Cause::kSlow, .rank = number, .text = name + " is slow: it moves on, and the others wait for it."};
    } else if (rank.position.kind == Activity::Kind::kBetweenSteps && is_in_data_loader(lines)) {
      why = {.cause = Cause::kDataLoader, .rank = number, .text = name + " is in the data loader, and waits for its next batch."};
    } else {
      why.text = name + " has not arrived.";
    }
    const auto since = first.waits.contains(which) ? until(first) - first.waits.at(which) : 0;
    why.text += " " + capital(names_of_ranks(waiting)) + have_waited(waiting.size(), since) + " in " + text_of(which) + ", which rank " +
                std::to_string(number) + " " + (rank.has_called(which) ? "has called, but not completed" : "has not called") + ".";
    why.text += " It " + std::string(rank.left.process == ProcessState::kDead ? "was " : "is ") + rank.activity() + ", for " +
                seconds(until(rank) - rank.last_move) + ".";
    if (rank.left.process == ProcessState::kDead && why.cause == Cause::kNotArrived) why.text += " Its process has ended since.";
    if (rank.left.process == ProcessState::kRunning && rank.left.processors >= 0) {
      why.text += rank.left.processors > kComputes ? " Its process computes." : " Its process sleeps.";
    }
    if (!lines.empty()) why.text += " It is at " + place_in(lines) + ".";
    why.text += last_common(which);
    return why;
  }

  /// A collective that all members of which there are files have called, and that some still wait for.
  std::optional<Why> stuck_collective() const {
    const RowNumber* unknown = nullptr;  // Some of the members have left no file.
    const RowNumber* stuck = nullptr;
    for (const auto& [which, waiting] : waiting_) {
      const auto& members = known_members(which.row);
      const bool all =
          std::all_of(members.begin(), members.end(), [&, &w = which](std::int64_t member) { return at(member).has_called(w); });
      const bool goes_on = std::any_of(waiting.begin(), waiting.end(), [&](std::int64_t rank) { return at(rank).left.moves; });
      if (all && !goes_on) (members.size() < members_.at(which.row).size() ? unknown : stuck) = &which;
    }
    if (stuck != nullptr) return of_stuck(*stuck);
    if (unknown == nullptr) return {};
    std::vector<std::int64_t> without_file;
    for (const auto member : members_.at(unknown->row)) {
      if (!ranks_.contains(member)) without_file.push_back(member);
    }
    const bool one = without_file.size() == 1;
    return Why{.cause = Cause::kNoFile,
               .rank = one ? without_file.front() : -1,
               .text = capital(names_of_ranks(waiting_.at(*unknown))) + (waiting_.at(*unknown).size() == 1 ? " waits in " : " wait in ") +
                       text_of(*unknown) + ", which all ranks have called that have left a file. There is no file of " +
                       names_of_ranks(without_file) +
                       (one ? ": it is the one that the others wait for." : ": it is one of these that the others wait for.") +
                       last_common(*unknown)};
  }

  Why of_stuck(const RowNumber& which) const {
    const auto& waiting = waiting_.at(which);
    for (const auto member : known_members(which.row)) {
      const auto* const call = at(member).call(which);
      if (call != nullptr && !call->is_done() && at(member).waits.empty() && !at(member).left.moves)
        return not_arrived(member, which, waiting);
    }
    std::map<std::string, std::vector<std::int64_t>> hosts;
    for (const auto member : known_members(which.row)) hosts[at(member).left.writer.host.data()].push_back(member);
    Why why{.cause = Cause::kLink, .rank = -1, .text = {}};
    why.text = "The link is slow or cut: all ranks of '" + which.row.substr(0, which.row.find(' ')) + "' have called " + text_of(which) +
               ", and " + names_of_ranks(waiting) +
               have_waited(waiting.size(), until(at(waiting.front())) - at(waiting.front()).waits.at(which)) + " for data.";
    for (const auto& [host, of_host] : hosts) {
      if (hosts.size() > 1) why.text += " On " + host + ": " + names_of_ranks(of_host) + ".";
    }
    why.text += last_common(which);
    return why;
  }

  std::optional<Why> each_other() const {
    for (const auto& [which, waiting] : waiting_) {
      for (const auto member : known_members(which.row)) {
        const auto& other = at(member);
        if (other.has_called(which) || other.waits.empty()) continue;
        const auto& others = other.waits.begin()->first;
        return Why{.cause = Cause::kEachOther,
                   .rank = -1,
                   .text = "The ranks wait for each other: " + names_of_ranks(waiting) + " in " + text_of(which) + " of '" +
                           row_text(which) + "', which " + names_of_ranks({member}) + " has not called, and " + names_of_ranks({member}) +
                           " in " + text_of(others) + " of '" + row_text(others) + "'. All ranks must make their calls in the same order." +
                           last_common(which)};
      }
    }
    return {};
  }

  // --- Texts.

  static std::string have_waited(std::size_t ranks, std::int64_t ns) {
    return ns <= 0 ? " waited" : (ranks == 1 ? " has waited " : " have waited ") + seconds(ns);
  }

  static std::string row_text(const RowNumber& which) { return which.row.substr(0, which.row.find(" #")); }

  /// The collective, as one of those that have called it knows it.
  std::string text_of(const RowNumber& which) const {
    for (const auto rank : known_members(which.row)) {
      if (const auto* const call = at(rank).call(which)) return at(rank).text_of(*call);
    }
    return "collective " + std::to_string(which.number) + " of '" + row_text(which) + "'";
  }

  /// The last collective of the row before this one that all its ranks have called, as far as there are files.
  std::string last_common(const RowNumber& which) const {
    RowNumber common{which.row, which.number};
    const auto members = known_members(which.row);
    for (const auto rank : members) {
      const auto calls = at(rank).calls(which.row);
      common.number = std::min(common.number, calls.empty() ? 0 : calls.back()->call.number + 1);
    }
    while (common.number > 1) {
      --common.number;
      for (const auto rank : members) {
        if (const auto* const call = at(rank).call(common)) {
          return " The last collective that all of them have called is " + at(rank).text_of(*call) + ".";
        }
      }
      break;
    }
    return {};
  }

  std::vector<std::string> lines_of(const RankNow& rank) const {
    return lines_of_ && rank.left.process == ProcessState::kRunning ? lines_of_(rank.rank()) : std::vector<std::string>();
  }

  Why with_place(Why why, std::int64_t rank) const {
    if (const auto place = place_in(lines_of(at(rank))); !place.empty()) {
      why.text += " " + capital(names_of_ranks({rank})) + " is at " + place + ".";
    }
    return why;
  }

  const LinesOf& lines_of_;
  std::map<std::int64_t, const RankNow*> ranks_;
  std::map<std::string, std::vector<std::int64_t>> members_;        ///< Of rows.
  std::map<std::string, std::vector<std::int64_t>> known_members_;  ///< Those of which there are files.
  std::map<RowNumber, std::vector<std::int64_t>> waiting_;          ///< The ranks that wait in each collective.
  std::map<RowNumber, std::vector<std::int64_t>> failed_;           ///< The ranks that have failed first in each collective.
  std::vector<std::int64_t> missing_;
  std::int64_t latest_ = 0;  ///< The last sign of life of all ranks.
};

}  // namespace

Why explain(const std::vector<RankNow>& ranks, const LinesOf& lines_of) {
  if (ranks.empty()) throw Error("there are no files of events: start the ranks with FSDP_EVENTS=FOLDER");
  return Diagnosis(ranks, lines_of).make();
}

Why explain(const std::vector<RankNow>& ranks) {
  return explain(ranks, [&](std::int64_t number) {
    const auto is_it = [&](const RankNow& rank) { return rank.rank() == number; };
    return lines_of_program(std::find_if(ranks.begin(), ranks.end(), is_it)->left.writer);
  });
}

}  // namespace fsdp::report
