#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/gradient_accumulator.h"
#include "engine/schedule.h"
#include "engine/step_observer.h"
#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// The life of gradients: collected per unit as autograd delivers them, reduced when backward leaves the unit, summed in rank order
/// into the main gradients. Called by Engine and MainParameters, under the engine's lock.
///
/// A reduction takes up to four hops, depending on placements and mesh: reduce-scatter over the inner ranks, reduce-scatter over the outer
/// ranks, all-gather over the outer ranks (HSDP) and over the inner ranks (replicated optimizer). Where the outer ranks do not cut shards,
/// each adds up an equal share of them.
class Reducer {
 public:
  struct Options {
    std::int64_t rank = 0;    ///< For error messages.
    bool report_nan = false;  ///< Reductions look for NaN first: see report_nan().
    /// Streams wait for collectives, and not the host, as on GPUs. Small gradients are then copied together, because a copy takes longer to
    /// launch than to run, and a unit that backward leaves is reduced when the reduction before has ended.
    bool on_stream = false;
  };
  Reducer(c10::Device device, memory::SlotPool& pool, memory::Accounting& accounting, Options options)
      : device_(device), pool_(pool), accounting_(accounting), options_(options) {}

  /// Adds a unit. Units are added in the order of their indices.
  void add(Unit& unit);
  /// Removes all units. No reduction of theirs may be under way.
  void forget_units();

  /// Null if there is no observer.
  void set_observer(StepObserver* observer) { observer_ = observer; }
  /// A microbatch begins that rehearsals will repeat. The moments of their reductions are predicted now.
  void begin_observation();
  /// From now on, gradients are dropped when they would be reduced. Existing gradients are set aside. Call it between backwards, when no
  /// reduction is under way.
  void begin_rehearsal();
  /// Drops the gradients of a rehearsal, and restores those that were set aside.
  void end_rehearsal();

  /// A gradient of this rank for one parameter, of any strides: copied (the first in this buffer) or added.
  void collect(Unit& unit, std::size_t parameter, const at::Tensor& gradient);

  /// With `reduces_on_departure` false, the gradients of this backward are reduced at its end.
  void begin_backward(bool reduces_on_departure);

  /// With false, each reduction ends before backward continues.
  void set_overlaps(bool overlaps) { overlaps_ = overlaps; }

  /// The backward proper has entered the unit.
  void enter(Unit& unit);
  /// A repeated forward has entered the unit. If backward left it only to repeat that forward, it is in the unit again.
  void reenter(Unit& unit);

  /// Backward moves to `destination`, and uses `together` with it. Starts the reductions of units that were entered and are related to none
  /// of them [Reduce on departure]. The moment and the units depend only on the order of entries, which is collective, not on the gradients
  /// that this rank got. `pass`: whether the backward proper enters `destination`, or a forward that is repeated.
  void depart_to(const Unit& destination, std::span<Unit* const> together, Pass pass);

  /// The end of backward: ranks exchange which parameters had gradients, and all reduce the units that any rank still has to reduce. Units
  /// that do not require synchronization are left as they are. Reductions may still be under way: see drain.
  void finish();

  /// Throws Error if gradients that are to be synchronized were left unreduced [Validate at the end].
  void validate() const;

  /// With Options::report_nan: throws Error on all ranks if a gradient of this backward had NaN on one. Needs drain() before.
  void report_nan() const;

  /// Completes all reductions.
  void drain();

  /// True if some unit has gradients, in any state.
  bool has_gradients() const;

  /// See MainParameters::take_gradients.
  std::vector<at::Tensor> take_main_gradient(Unit& unit);

  /// Frees the main gradients, and gradients that are reduced over the inner ranks only.
  void zero_grad();

  /// Drops unreduced gradients after a failure. Waits for reductions under way, so that no peer writes into reused memory.
  void drop();

  /// Call it after a failure. With `took_all` (the failure of a backward), drops all gradients. Otherwise, gradients that earlier backwards
  /// have reduced stay, and reductions under way end first; if these can no longer end, all gradients are dropped.
  void reset(bool took_all);

 private:
  enum class Hop : std::uint8_t { kInnerReduce, kOuterReduce, kOuterGather, kInnerGather };
  /// One unit's reduction, at one of its hops. The next hop starts at a moment that all ranks share [Order is collective], which may be
  /// later than the end of this one.
  struct Reduction {
    GradientAccumulator* gradients;
    Hop hop;
    bool over_outer;  ///< Whether it continues over the outer dimension, if there is one, according to the user's setting when it began.
    bool in_place;    ///< Whether the first hop writes its result into this rank's region of the unreduced buffer.
    std::unique_ptr<comm::Pending> pending = {};  ///< Null once the hop is complete.
  };

  /// The moment in a unit's next backward at which its gradients are reduced, as the ranks have agreed.
  struct Prediction {
    int reduced_at;
    bool left_to_end;
    SentIn sent_in;
    bool adds_up;
  };

  /// Gradients from before a rehearsal.
  struct SetAside {
    std::vector<std::unique_ptr<GradientAccumulator>> gradients;
    std::vector<GradientAccumulator*> collecting;
    bool expects;
  };

  void depart_from(GradientAccumulator& gradients);
  void divide_units();
  void index_units();
  GradientAccumulator& of(const Unit& unit, std::size_t parameter) const;
  bool reduced_on_departure(const GradientAccumulator& gradients, int n) const;
  bool under_way(const GradientAccumulator& gradients) const;
  static std::optional<Hop> next_hop(const Reduction& reduction);
  void acquire(GradientAccumulator& gradients);
  void acquire_buffer(GradientAccumulator& gradients, CollectedIn collected_in);
  void convert_collected(GradientAccumulator& gradients);
  void find_givers(std::span<GradientAccumulator* const> unreduced) const;
  void collect_unexpected(GradientAccumulator& gradients);
  void agree_on_dtype(GradientAccumulator& gradients);
  void allocate_main_gradient(Unit& unit);
  void release_main_gradient(Unit& unit);
  void allocate_reduced(GradientAccumulator& gradients);
  void deliver(GradientAccumulator& gradients);
  void reduce(GradientAccumulator& gradients);
  void show_collected(const GradientAccumulator& gradients);
  void reduce_at_end(GradientAccumulator& gradients);
  void reduce_left(GradientAccumulator& gradients, bool is_unreduced);
  void begin_inner(GradientAccumulator& gradients, bool in_place);
  void begin(Reduction reduction);
  void start(Reduction& reduction);
  std::optional<comm::Encoding> encoding(const GradientAccumulator& gradients, std::size_t k, std::int64_t shard_numel, Hop hop,
                                         LostByRounding& lost) const;
  void forget_lost(GradientAccumulator& gradients);
  std::unique_ptr<comm::Pending> reduce_over_inner_ranks(GradientAccumulator& gradients, bool in_place);
  std::unique_ptr<comm::Pending> reduce_over_outer_ranks(GradientAccumulator& gradients);
  static std::unique_ptr<comm::Pending> gather_over_outer_ranks(const GradientAccumulator& gradients);
  static std::unique_ptr<comm::Pending> gather_over_inner_ranks(const GradientAccumulator& gradients);
  void complete(Reduction& reduction);
  void take_sums(GradientAccumulator& gradients);
  void take_result(GradientAccumulator& gradients);
  /// Completes the hop, and starts the next one; true if there is none.
  bool advance(Reduction& reduction);
  /// Advances all reductions except the last `newest` ones in this way. Reductions without a next hop are removed.
  void advance_all_but(std::size_t newest);
  void complete_oldest_inner();
  std::size_t inner_under_way() const;
  void release_unreduced(GradientAccumulator& gradients);

  c10::Device device_;
  memory::SlotPool& pool_;
  memory::Accounting& accounting_;
  Options options_;
  bool copies_to_host_ = false;  ///< Copies of offloaded gradients may be under way.
  bool reduces_on_departure_ = true;
  bool expects_ = false;  ///< A backward for all leaves has begun since the last finish().
  bool overlaps_ = true;
  std::vector<std::unique_ptr<GradientAccumulator>> gradients_;  // in the order of units
  std::vector<std::vector<GradientAccumulator*>> by_unit_;       // by Unit::index
  bool divided_ = false;                                         // since the last unit was added
  std::vector<GradientAccumulator*> collecting_;
  std::vector<Unit*> entered_;        // by the backward proper, and not left
  std::vector<Unit*> interrupted_;    // left for a repeated forward, which may come back to them
  std::deque<Reduction> reductions_;  // in the order of their start
  StepObserver* observer_ = nullptr;
  std::optional<SetAside> aside_;      // in a rehearsal
  std::vector<Prediction> predicted_;  // of each of gradients_, when the observed microbatch began
};

}  // namespace fsdp::engine
