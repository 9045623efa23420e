#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "events/rank_replay.h"
#include "report/clock_alignment.h"
#include "report/event_files.h"
#include "report/waits.h"

namespace fsdp::report {

/// A row of ranks, and the number of a collective in it.
struct RowNumber {
  std::string row;
  std::uint64_t number = 0;

  auto operator<=>(const RowNumber&) const = default;
};

/// The activity of one rank when its file was read, and its history. Times are in ns, of the first rank's clock.
class RankNow : public events::RankReplay {
 public:
  RankNow(RankEvents events, const ClockOffset& ahead);

  std::int64_t rank() const { return left.writer.rank; }
  struct Row {
    std::uint32_t source = 0;
    std::uint64_t last = 0;  ///< The number of the last call; 0: none.
  };
  const std::map<std::string, Row>& rows() const { return rows_; }
  /// The last calls in a row, in the order of their numbers; empty if there are none.
  std::vector<const Collective*> calls(const std::string& row) const;
  /// The call of this number; null if it has not been made, or was made so long ago that it is not kept.
  const Collective* call(const RowNumber& which) const;
  /// Whether the rank has reached this call in the row.
  bool has_called(const RowNumber& which) const;
  /// The collective, as all ranks know it.
  RowNumber which(const CollectiveKey& key) const { return {row_of(key.first), key.second}; }

  /// The text of a name in its events.
  std::string_view text_of(std::uint32_t name) const { return left.text_of(name); }
  /// "the all-gather of 'blocks.3'".
  std::string text_of(const Collective& collective) const;
  bool are_alike(const Collective& collective, const RankNow& other, const Collective& others) const;
  /// "in forward of 'blocks.1'".
  std::string activity() const { return events::position_text(position.kind, text_of(position.unit)); }

  /// Its first failure: a collective, or the exception that has ended it.
  struct Failure {
    std::int64_t time = 0;
    std::string text;             ///< Of the error; may be empty.
    std::optional<RowNumber> in;  ///< The collective, if it is one; its number is 0 if only the row is known.
  };

  RankEvents left;
  ClockOffset clock;
  std::map<RowNumber, std::int64_t> waits;  ///< The collectives that it waits for, and since when.
  std::optional<Failure> failure;
  std::int64_t last_sign = 0;  ///< The time of its last record: now, if its process is alive.

 private:
  std::string row_of(std::uint32_t source) const { return source < left.sources.size() ? left.sources[source] : std::string(); }

  std::map<std::string, Row> rows_;
};

/// The ranks of a run, in one clock.
std::vector<RankNow> ranks_of(std::vector<RankEvents> run);

}  // namespace fsdp::report
