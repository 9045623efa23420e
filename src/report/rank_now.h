#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "events/event.h"
#include "events/event_memory.h"
#include "events/whereabouts.h"
#include "report/event_files.h"

namespace fsdp::report {

/// A row of ranks, and the number of a collective in it.
struct RowNumber {
  std::string row;
  std::uint64_t number = 0;

  auto operator<=>(const RowNumber&) const = default;
};

/// A collective as one rank has called it.
struct PostedCall {
  std::uint64_t number = 0;
  std::uint32_t operation = 0;  ///< An index into RankNow::names, as `unit`.
  std::uint32_t unit = 0;
  std::int64_t bytes = 0;
  std::int64_t time = 0;
  bool done = false;
};

/// What one rank was doing when its file was read, and how it got there. Times are in ns since the epoch, by the clock of its host.
class RankNow {
 public:
  explicit RankNow(const RankEvents& rank);

  std::int64_t rank() const { return writer.rank; }
  /// The last calls in a row, in the order of their numbers; empty if there are none.
  const std::vector<PostedCall>& calls(const std::string& row) const;
  /// The call of this number; null if it has not been made, or was made so long ago that it is not kept.
  const PostedCall* call(const RowNumber& which) const;
  /// Whether the rank has come so far in the row.
  bool has_called(const RowNumber& which) const;
  bool is_member(const std::string& row) const { return rows_.contains(row); }
  const std::map<std::string, std::vector<PostedCall>>& rows() const { return rows_; }

  const std::string& operation_of(const PostedCall& call) const { return names_[call.operation]; }
  const std::string& unit_of(const PostedCall& call) const { return names_[call.unit]; }
  /// "the all-gather of 'blocks.3'".
  std::string text_of(const PostedCall& call) const;
  bool are_alike(const PostedCall& call, const RankNow& other, const PostedCall& others) const;
  /// "in forward of 'blocks.1'".
  std::string activity() const;

  /// What it has failed with first: a collective, or the exception that has ended it.
  struct Failure {
    std::int64_t time = 0;
    std::string text;             ///< Of the error; may be empty.
    std::optional<RowNumber> in;  ///< The collective, if it is one; its number is 0 if only the row is known.
  };

  events::EventWriter writer;
  ProcessState process = ProcessState::kElsewhere;
  std::map<RowNumber, std::int64_t> waits;  ///< The collectives that it waits for, and since when.
  std::optional<Failure> failure;
  std::optional<events::EndKind> end;
  events::Whereabouts::Pass pass = events::Whereabouts::Pass::kNone;
  std::int64_t last_event = 0;
  std::int64_t last_move = 0;  ///< When its computation moved last: into a unit, or to another pass; or when it made its last call.
  bool moves = false;          ///< It has written events while somebody looked.
  double processors = -1;      ///< How many processors its process used while somebody looked; -1: not known.

 private:
  struct OfSource;
  void take(const events::Event& event, OfSource& source);
  void fail(Failure next);

  std::vector<std::string> names_;
  std::map<std::string, std::vector<PostedCall>> rows_;
  events::Whereabouts whereabouts_;
};

}  // namespace fsdp::report
