#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "engine/unit.h"
#include "replay/findings.h"
#include "replay/microbatch_record.h"

namespace fsdp::replay {

/// The findings of a rank about its main parameters of a unit.
struct MainTestimony {
  bool remembered_differs = false;  ///< They differ from those that were remembered after the update.
  bool changed = false;             ///< They have changed during the microbatch, although nothing wrote to them.
  /// One for each of Unit::main_pieces(), as in UnitRecord::whole: of the result of a gather of them.
  std::vector<std::int64_t> as_gathered;
};

/// The observations of one rank in a checked microbatch. The vectors are by unit.
struct Testimony {
  std::span<const std::unique_ptr<engine::Unit>> units;
  std::vector<MainTestimony> main;
  const MicrobatchRecord& own;
};

/// The observations of one rank in its repetition of another rank's microbatch.
struct Repetition {
  std::int64_t origin;  ///< That rank, global.
  const MicrobatchRecord& record;
};

/// Compares the observations of ranks about the units that they share. All methods are collective over the ranks that have these units.
class RankComparison {
 public:
  /// `units` are their positions in the model; all have the same communicators.
  RankComparison(const Testimony& testimony, std::vector<std::size_t> units, std::int64_t global_rank);

  /// Compares parameters and reductions. Returns a line for each difference, the same on all ranks.
  std::vector<std::string> compare_data() const;
  /// Compares gradients with those of repetitions. Returns true if some differ.
  bool adds_dispute(const Repetition& repetition);
  /// Returns which ranks are right, from all repetitions so far: a line, or nothing if all agree. Needs no other ranks.
  std::optional<std::string> settle_dispute() const;

 private:
  /// The observations of all ranks about one unit, by their index.
  struct Column {
    std::vector<std::int64_t> flags;
    std::vector<std::int64_t> whole;
    std::vector<std::int64_t> gradients;
    std::vector<std::int64_t> unreduced;
    std::vector<std::int64_t> order;
    /// By the index of the rank whose batch it is: the ranks that have computed them, and their digests.
    std::vector<std::vector<std::pair<std::int64_t, std::pair<std::int64_t, std::int64_t>>>> repeated;
  };

  std::vector<std::int64_t> numbers_of(std::size_t unit) const;
  void add_sums(std::vector<std::string>& lines, const engine::Unit& unit, const Column& column) const;
  void add_flags(std::vector<std::string>& lines, const engine::Unit& unit, const Column& column) const;
  std::vector<std::string> compare_whole(std::size_t unit, const Column& column) const;
  std::vector<Vote> votes_on(const Column& column, std::size_t origin) const;
  std::size_t index_of(std::int64_t rank) const;

  const Testimony& testimony_;
  std::vector<std::size_t> units_;
  comm::Ranks ranks_;
  std::vector<std::int64_t> global_ranks_;  ///< By index.
  std::vector<Column> columns_;             ///< By position in units_.
};

}  // namespace fsdp::replay
