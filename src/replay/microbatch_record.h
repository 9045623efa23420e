#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/step_observer.h"
#include "engine/unit.h"

namespace fsdp::replay {

/// The observations of one rank about a unit in one microbatch. Digests without data are 0.
struct UnitRecord {
  /// Digests of the unsharded parameters when they were first seen: one for each piece of the unit's layout, over those of its sub-buffers
  /// that are gathered as they are; the last one is that of the parameters that are sent in a gather format, which are not in pieces.
  std::vector<std::int64_t> whole;
  bool whole_changed = false;  ///< They had other bits when they were seen again.
  bool written = false;        ///< An operator wrote to them, so they can't be checked.
  std::int64_t gradients = 0;  ///< Of what autograd delivered.
  std::int64_t order = -1;     ///< How many units had gradients before this one; -1: it had none.
  std::int64_t unreduced = 0;  ///< Of the gradients when they were about to be reduced; 0, too, if those of other backwards are among them.
  bool added_up = false;       ///< Some were reduced in a sum with those of other backwards.
  bool unreduced_changed = false;  ///< They had other bits when the reduction had ended.
  bool sums_differ = false;        ///< The same gradients, reduced twice, gave different sums on this rank.
};

/// Whether reductions are made twice, so that their sums can be compared.
enum class Reductions : std::uint8_t { kOnce, kTwice };

/// Records the observations of a rank in one microbatch.
class MicrobatchRecord final : public engine::StepObserver {
 public:
  MicrobatchRecord(std::span<const std::unique_ptr<engine::Unit>> units, Reductions reductions)
      : units_(units.size()), reductions_(reductions) {}

  void entered(const engine::Unit& unit) override;
  void frees(const engine::Unit& unit) override;
  void arrived(const engine::Unit& unit, std::size_t parameter, const at::Tensor& gradient) override;
  void collected(const engine::Unit& unit, std::span<const at::Tensor> unreduced, bool of_one_backward) override;
  void reduces(const engine::Unit& unit, std::size_t sub_buffer, comm::Communicator& ranks, std::span<const comm::ReducePart> parts,
               double scale) override;
  void reduced(const engine::Unit& unit, std::size_t sub_buffer) override;

  const UnitRecord& of(std::size_t unit) const { return units_[unit]; }

 private:
  void look_at_whole(const engine::Unit& unit);

  /// A reduction under way.
  struct Running {
    std::vector<comm::ReducePart> parts;
    std::int64_t sums = 0;       ///< A digest of the results when it was made first.
    std::int64_t unreduced = 0;  ///< A digest of its input.
  };

  std::vector<UnitRecord> units_;
  std::map<std::pair<std::size_t, std::size_t>, Running> running_;  ///< By unit and first sub-buffer.
  std::int64_t with_gradients_ = 0;                                 ///< Units.
  const Reductions reductions_;
};

/// The digests that a unit's unsharded parameters have: see UnitRecord::whole.
std::vector<std::int64_t> digests_of_whole(const engine::Unit& unit);

}  // namespace fsdp::replay
