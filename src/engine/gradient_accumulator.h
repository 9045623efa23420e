#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/arrived_gradients.h"
#include "engine/buffer.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// Where the unreduced gradients of a unit are. Transitions, all made by Reducer:
///   kNone -> kCollecting      the first gradient arrived, or backward leaves a unit to which this rank gives none
///   kNone -> kReducing        the reduce-scatter was started, and this rank gives nothing to it [Attendance is agreed]
///   kCollecting -> kAddingUp  a gradient of a backward without synchronization arrived
///   kCollecting, kAddingUp -> kReducing  the reduce-scatter was started
///   kReducing -> kNone        the reduce-scatter completed: the main gradients, or a later hop of the reduction, have the result; the
///   buffer is free
///   any -> kNone              dropped by reset
enum class GradientState : std::uint8_t {
  kNone,        ///< There are none.
  kCollecting,  ///< In a buffer, to be reduced when backward leaves the unit or at its end.
  kAddingUp,    ///< In a buffer; some come from backwards without synchronization, and all wait for a backward with it.
  kReducing,    ///< On their way to the other ranks.
};

/// The buffer in which gradients are collected. Chosen when the first one arrives; kComputed becomes kWire if they have to be converted.
enum class CollectedIn : std::uint8_t {
  kComputed,  ///< `computed`: they are about to travel as autograd made them.
  kWire,      ///< `wire`: they are about to travel in the wire's dtype.
  kLocal,     ///< `local()`: backwards without synchronization add up in the main gradients' dtype.
  kMain,      ///< As kLocal, but in the memory of the main gradients, where the result will lie, too.
};

/// [Sent as computed] The dtype in which reductions over the inner ranks send a unit's gradients, the same on all ranks. A gradient that
/// autograd made in bf16 or half, and that arrives once, loses nothing when it is sent in that dtype and summed in fp32. Transitions:
///   kUndecided -> kComputeDtype  the first reduction: each gradient had arrived once, in the compute dtype, on every rank
///   kUndecided -> kWireDtype     the first reduction: some rank had converted its gradients
///   kComputeDtype -> kWireDtype  the ranks exchange that a gradient arrived twice on one of them
/// Gradients of backwards without synchronization are added up first. The reduction that takes them sends in the wire's dtype, and decides
/// nothing.
enum class SentIn : std::uint8_t { kUndecided, kComputeDtype, kWireDtype };

/// A buffer with a view of its shape for each trainable parameter, and the ranges that belong to no parameter.
struct GradientBuffer : Buffer {
  std::vector<at::Tensor> views;  ///< Per parameter; undefined for frozen ones.
  std::vector<at::Tensor> padding;
};

/// [Rounded once] With error feedback: what rounding has lost of the contributions that this rank sent last in a hop. By sub-buffer; empty
/// before the first reduction.
struct LostByRounding {
  std::vector<at::Tensor> parts;
  std::int64_t bytes = 0;
};

/// Gradients that are reduced over the inner dimension only: this inner rank's shards. Unused on a 1-D mesh. If the outer ranks do not cut
/// shards, each adds up an equal share of them; the last share may reach beyond the shards.
struct PartialSums {
  Buffer buffer;
  bool is_held = false;  ///< `buffer` holds a sum that is still to be reduced over the outer dimension.
  Buffer wire;           ///< `buffer` in the wire's dtype, where that differs.
  Buffer staging;        ///< The data that the outer ranks send.
  LostByRounding lost;
};

/// [Departures are counted] A backward may leave a unit several times (a block that is used in several places). Departures count from 1.
struct Departures {
  int count = 0;          ///< Those of the running backward so far.
  int last_gradient = 0;  ///< The departure before which this rank's last gradient of this backward arrived; 0: none arrived.
  int reduced_at = 1;     ///< Agreed by the ranks from the departures of earlier backwards.
};

/// The gradients of one unit, or of a part of it that is reduced by itself, on their way from autograd to its main gradients: buffers, and
/// what is known of each parameter. Reducer owns it. The functions in gradient_usage.h set the fields about which ranks tell each other.
struct GradientAccumulator {
  /// What this rank knows of one parameter's gradient.
  struct OfParameter {
    bool seen = false;  ///< It is in the buffer in which gradients are collected.
    /// A flag on its device: whether it had NaN before a reduction of this backward. Undefined if this was not checked.
    at::Tensor has_nan;
    bool contributed = false;  ///< This rank has had a gradient since the last exchange of usage.
    bool partial = false;      ///< Some rank had a gradient that is not yet reduced over the outer dimension.
  };

  /// Of all trainable sub-buffers, or of these.
  explicit GradientAccumulator(Unit& unit);
  GradientAccumulator(Unit& unit, std::vector<std::size_t> sub_buffers);

  Unit& unit;
  const std::vector<std::size_t> sub_buffers;
  const bool is_part;                   ///< Not of all: [Large parameters do not wait].
  std::vector<std::size_t> held;        ///< The unit's parameters in these sub-buffers; of all, also frozen ones.
  std::vector<OfParameter> parameters;  ///< By index in the unit.
  bool valid;                           ///< Its part of the main gradients has what was reduced since zero_grad().

  GradientState state = GradientState::kNone;
  CollectedIn collected_in = CollectedIn::kWire;
  GradientBuffer wire;
  std::unique_ptr<GradientBuffer> own_local;  ///< Null where the wire's dtypes are the main gradients'.
  GradientBuffer& local() { return own_local ? *own_local : wire; }
  /// In the dtype of the whole parameters, where [Sent as computed] applies; otherwise null.
  std::unique_ptr<GradientBuffer> computed;
  Buffer computed_staging;
  GradientBuffer& collected() {
    if (collected_in == CollectedIn::kComputed) return *computed;
    return collected_in == CollectedIn::kWire ? wire : local();
  }

  bool agrees_on_dtype = false;  ///< The ranks decide `sent_in`; false where it can only be the wire's dtype.
  SentIn sent_in = SentIn::kUndecided;
  /// A backward without synchronization has begun since the last reduction.
  bool adds_up = false;
  /// Since the last exchange of usage, a parameter got a second gradient of one backward, or one of another dtype.
  bool arrived_twice = false;
  /// Those that came when it was decided that the buffer would be sent as computed. They are reduced at the end of backward.
  struct Unexpected {
    std::size_t parameter;
    at::Tensor gradient;
  };
  std::vector<Unexpected> unexpected;

  /// The buffer that the reduction over the inner ranks sends, and the one into which it receives.
  const GradientBuffer& sent() const { return collected_in == CollectedIn::kComputed ? *computed : wire; }
  Buffer& receives() { return collected_in == CollectedIn::kComputed ? computed_staging : staging; }
  /// Copied or lent before anything reads the buffer, and copied at the end of backward.
  ArrivedGradients arrived;
  at::Tensor unreduced(std::size_t k) const {
    auto lent = arrived.lent(k);
    return lent.defined() ? lent : sent().parts[k];
  }
  /// Gradients of this rank wait in a buffer.
  bool collects() const { return state == GradientState::kCollecting || state == GradientState::kAddingUp; }

  Buffer staging;
  LostByRounding lost;
  std::uint64_t reductions = 0;  ///< The number of reduce-scatters over the inner ranks so far; the same on all ranks.
  /// The same number in memory of the device, where replays of a captured step count, too. Only for stochastic rounding on devices.
  at::Tensor reductions_on_device;
  PartialSums partial;
  at::Tensor partial_shards(std::size_t k) const;  ///< The shards in `partial`, without the elements beyond them.
  at::Tensor own_share(std::size_t k) const;       ///< The share of `partial` that this replica adds up.
  /// Where reductions put their results: the main gradients, or, if those are offloaded, views of `reduced_buffer`, from which they are
  /// copied. By sub-buffer, as are the parts of all buffers. Those of other sub-buffers than its own are undefined in buffers.
  std::vector<at::Tensor> reduced;
  Buffer reduced_buffer;

  Departures departures;

  /// [Attendance is agreed] By rank of the row: whether it has attended, so that its gradients count in the reduction at the end of this
  /// backward. Empty if all have, or if the unit is not optional.
  std::vector<bool> gives;
  std::int64_t givers = 0;  ///< The number of ranks, over both dimensions, that have attended; 0 if the unit is not optional.

  /// [Usage is agreed] Whether the exchange at the end of the last backward found that it had gradients left to reduce.
  bool left_to_end = false;
  bool reduced_unasked = false;  ///< Reduced for that reason, at the end of this backward, before the exchange.
};

}  // namespace fsdp::engine
