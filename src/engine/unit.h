#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/attendance.h"
#include "engine/buffer.h"
#include "engine/gather_extension.h"
#include "engine/schedule.h"
#include "fsdp/device_mesh.h"
#include "fsdp/gather_format.h"
#include "fsdp/grad_comm_format.h"
#include "fsdp/mixed_precision.h"
#include "fsdp/offload.h"
#include "fsdp/placements.h"
#include "layout/unit_layout.h"
#include "memory/device_memory.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// Where a unit's unsharded parameters are. Transitions, all made by Unit::set_state, which refuses others:
///   kSharded -> kGathering  an all-gather was started (read ahead, or about to be used)
///   kGathering -> kPresent  it completed
///   kSharded -> kPresent    the unit is made, and its parameters are replicated and need no gather
///   any -> kSharded         evicted, or given up; or, for replicated parameters, made stale by a write to the main ones
enum class ParameterState : std::uint8_t { kSharded, kGathering, kPresent };

/// How the computation, or the user, uses a unit in the running pass (a forward, or a backward). Whether the unit is left depends on it.
/// All transitions are made by Engine::set_use, which refuses others:
///   any -> kInUse            entered; in a backward, by the backward proper
///   any but kInUse -> kRepeated   entered by a forward that activation checkpointing repeats within a backward
///   kInUse, kRepeated -> kLeft, kKept   the computation has left it; also from kUnused, if forward was still in it when backward began
///   any -> kPinned           the user unsharded it
///   kUnused, kLeft, kKept -> kListed   gathered because a unit that lists it for prefetch was entered
///   any -> kAttended         ranks have agreed that not all of them use it, and this one does [Attendance is agreed]
///   any -> kUnused           evicted, or the next pass began
enum class UseState : std::uint8_t {
  kUnused,    ///< Not entered in this pass. If it is present, an earlier pass has left it gathered.
  kPinned,    ///< Unsharded by the user: stays until it is used or resharded, or the parameters change.
  kListed,    ///< Gathered for a list of set_modules_to_forward_prefetch or backward_prefetch: stays until it is used, or backward ends.
  kInUse,     ///< The computation is in it, so entering it again changes nothing. A trigger's fast path checks for this state only.
  kRepeated,  ///< Used by the forward that is repeated. The backward proper still has to enter it.
  kLeft,      ///< The computation has moved on. If it is present, an option keeps it.
  kKept,      ///< As kLeft, and present: chosen by a memory budget, or within keep_gathered_bytes.
  kAttended,  ///< Gathered on this rank until the backward has ended. Using it is no move of the computation.
};

/// [Large parameters do not wait] Bytes of gradients, in the dtype of the computation, from which a sub-buffer of a unit that encloses
/// others is reduced by itself: so many are worth a collective of their own.
std::int64_t reduced_alone();
/// For tests, whose models are small.
void set_reduced_alone(std::int64_t bytes);

/// True if `next` may follow `now`.
bool may_follow(UseState now, UseState next);

/// What the last backward means for gathered copies of the unit's main parameters [Current when forward begins]. Transitions:
///   any -> kAccumulated      a backward ended, and gradients continue to add up
///   any -> kGaveGradients    a backward ended, and the optimizer has gradients: main parameters may be written unnoticed
///   kAccumulated -> kNone    a root forward begins
///   kGaveGradients -> kNone  a write to main parameters was noticed
enum class LastBackward : std::uint8_t { kNone, kAccumulated, kGaveGradients };

struct Unit;

/// One parameter of a unit. The engine never keeps a parameter alive: its tensors belong to the modules.
struct UnitParameter {
  std::string name;          ///< Fully qualified.
  std::size_t position = 0;  ///< Its index in the model's named_parameters().
  std::vector<std::int64_t> shape;
  bool tensor_parallel = false;  ///< Whether it is a piece of a tensor-parallel parameter, of which other ranks hold other pieces.
  std::vector<std::int64_t> global_shape;   ///< The shape of that parameter; otherwise `shape`.
  std::vector<std::int64_t> global_offset;  ///< Where the piece begins in that parameter.
  at::ScalarType dtype = at::kFloat;        ///< The dtype that it had before it was sharded.
  bool trainable = true;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor{at::Tensor().getIntrusivePtr()};

  bool has_gradient = false;  ///< Whether some rank has had a gradient since zero_grad(), so that the optimizer updates it.
};

/// The dtypes of a sub-buffer's elements through their life, and how they are gathered. (MixedPrecisionPolicy, resolved.)
struct SubBufferFormat {
  at::ScalarType compute = at::kFloat;              ///< The dtype of the unsharded parameters.
  at::ScalarType main = at::kFloat;                 ///< The dtype of the main parameters and the optimizer state.
  at::ScalarType main_gradient = at::kFloat;        ///< The dtype of the main gradients.
  at::ScalarType wire_gradient = at::kFloat;        ///< The dtype in which gradients are sent.
  bool rounds_sums = false;                         ///< Whether sums, which are computed in fp32, are rounded to the wire's dtype.
  std::shared_ptr<const GatherFormat> gather = {};  ///< Null: parameters are sent in `compute`.
  bool extended = false;  ///< WholeParameters::extension has its main and unsharded parameters; they lie in no buffer.

  bool operator==(const SubBufferFormat&) const = default;
  /// True if gathered values have the same bits as the main parameters.
  bool gathers_main() const { return compute == main && gather == nullptr; }
  bool sends_differences() const { return gather != nullptr && gather->differences; }
};

/// Returns the text about a gather format that ranks compare.
std::string describe(const GatherFormat& format);

/// Throws Error if a unit with these placements can't have these formats, because differences need parameters that stay unsharded.
void check_formats(const std::string& unit, const std::vector<SubBufferFormat>& formats, const Placements& placements);

/// What happens to the unsharded parameters of a unit after forward.
enum class AfterForward : std::uint8_t {
  kReshard,         ///< They are freed. If the unit has a post-forward mesh, a copy stays there until the unit is gathered again.
  kUntilBackward,   ///< They stay for backward. The next root forward gathers them again.
  kAcrossForwards,  ///< They stay for backward, and also for the next root forward [Current when forward begins].
};

struct UnitOptions {
  Placements placements;
  /// The main parameters and optimizer state are sharded over the outer dimension as well (HFSDP).
  bool outer_sharded_optimizer = false;
  AfterForward after_forward = AfterForward::kReshard;
  bool reshard_after_backward = true;
  /// With kReshard: whether unsharded parameters stay for backward nevertheless, as a memory budget has chosen.
  bool kept_by_budget = false;
  /// Whether a memory budget has chosen that the program repeats the unit's forward in backward.
  bool recomputes = false;
  /// False if no update follows this backward, although it gives gradients: later backwards add to them first.
  bool updated_after_backward = true;
  /// Whether unsharded parameters are not freed when they are resharded, so that they have the same addresses when they are gathered again.
  bool fixed_addresses = false;
  /// By how much the sum of all ranks' gradients is divided; 0: the number of ranks.
  double gradient_divide_factor = 0;
  /// [Rounded once] The format in which gradients travel in messages; without one, that of SubBufferFormat::wire_gradient.
  std::optional<GradCommFormat> grad_comm_format;
  /// The policy as the user gave it. SubBufferFormat has the dtypes that follow from it.
  std::optional<MixedPrecisionPolicy> mixed_precision;
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  Offload offload = Offload::kNone;
  memory::HostMemoryKind host_memory = memory::HostMemoryKind::kPinned;  ///< The kind of host memory for offloaded data.

  bool reshards_after_forward() const { return after_forward == AfterForward::kReshard; }
};

/// The facts of a model, beside its units, that must be the same on all ranks.
struct ModelFacts {
  bool is_last_backward = true;
  bool manual_finalization = false;
  std::string updates;                              ///< The settings of all optimizers that have updated it.
  std::map<std::uint64_t, std::string> updates_by;  ///< The same settings by optimizer; see MainParameters::tell_update.
};

/// Throws Error if a format does not exist, or can't be used for such gradients.
void check_grad_comm(const std::optional<GradCommFormat>& format, std::span<const UnitParameter> parameters,
                     const layout::UnitLayout& layout, std::span<const SubBufferFormat> formats);

/// The ranks with which a unit communicates. Shards are cut over `gather`'s ranks; each is replicated, or cut once more, over `outer`'s.
struct UnitCommunicators {
  std::shared_ptr<comm::Communicator> gather;        ///< All-gathers of parameters along the sharding dimension.
  std::shared_ptr<comm::Communicator> reduce;        ///< Its reductions: the same ranks, perhaps another process group.
  std::shared_ptr<comm::Communicator> outer;         ///< The outer dimension; null on a 1-D mesh.
  std::shared_ptr<comm::Communicator> post_forward;  ///< The post-forward mesh: ranks that have a copy between them; or null.

  int outer_size() const { return outer ? outer->size() : 1; }
  int outer_rank() const { return outer ? outer->rank() : 0; }
};

/// Returns the communicators of a unit on this mesh, whose last dimension shards. All units of a mesh share them. `post_forward`
/// is the number of ranks of the post-forward mesh; 0 if there is none. Collective over the mesh if a communicator has to be made.
UnitCommunicators communicators_of(const DeviceMesh& mesh, bool separate_reduce_group, std::int64_t post_forward);

struct Unit;

/// Every communicator of these units once, in the order of the units.
std::vector<comm::Communicator*> communicators_of(std::span<const std::unique_ptr<Unit>> units);

/// Where a unit lies in its model. The code that divides the model sets it, and the engine to which the unit is added.
struct UnitPlace {
  std::uint64_t model = 0;            ///< The model's number, which distinguishes models on the same ranks: see agree_on_model.
  const ModelFacts* facts = nullptr;  ///< The facts of the engine's model.
  std::size_t index = 0;              ///< Position in Engine::units().
  Unit* parent = nullptr;             ///< The closest enclosing unit; null for the root.
  std::vector<const Unit*> called;    ///< Units that do not lie within this one, but were entered while its modules ran.
  std::array<std::vector<std::size_t>, 2> prefetch;  ///< By Pass: the units to gather ahead of this one's use, if the user listed them.
};

/// The unsharded parameters of a unit, and how they are used. Gatherer fills and frees them.
struct WholeParameters {
  std::atomic<UseState> use = UseState::kUnused;
  LastBackward last_backward = LastBackward::kNone;
  bool written = false;  ///< An operator wrote to them: eviction writes the owned slices back.
  /// [Differences need a base] Whether all ranks have the values of the last gather, so that the next one may send differences to them.
  bool is_base = false;
  /// The modules' parameters view its storage. It has bytes only while the unit is being gathered or present; always, if parameters are
  /// replicated.
  Buffer buffer;
  at::Tensor memory;    ///< The memory of `buffer`, if parameters are replicated.
  Buffer wire;          ///< The bytes of sub-buffers that are sent in a gather format; it has bytes during a gather only.
  Buffer post_forward;  ///< This rank's part of the copy on the post-forward mesh; it has bytes until the unit is gathered.
  std::unique_ptr<comm::Pending> gather;
  std::shared_ptr<GatherExtension> extension;  ///< Gathers the extended sub-buffers; null if there are none.

  /// True if entering the unit would change nothing. Any thread may call it.
  bool in_use(Pass pass) const {
    const auto now = use.load(std::memory_order_acquire);
    return now == UseState::kInUse || now == UseState::kAttended || (now == UseState::kRepeated && pass == Pass::kForward);
  }
  /// Detaches the memory of `buffer`, and gives it back to the pool if it came from there.
  void free();
};

/// If the optimizer is sharded over the outer dimension as well: this inner rank's shards in the form in which inner gathers send them.
struct InnerShards {
  Buffer buffer;
  at::Tensor memory;      ///< The memory of `buffer`.
  bool outdated = false;  ///< The main parameters were written since `buffer` was gathered over the outer dimension.
  std::unique_ptr<comm::Pending> gather;
};

/// The main parameters of a unit: the pieces that this rank's optimizer updates. MainParameters documents which code may read and write
/// them, and when.
struct UnitMain {
  std::vector<at::Tensor> parts;  ///< Per sub-buffer, 1-D.
  Buffer buffer;  ///< The memory of `parts`, without sub-buffers whose main parameters are a region of the unsharded ones or of the shards.
  at::Tensor memory;  ///< The memory of `buffer`.
};

/// The main gradients of a unit, trainable sub-buffers only: like its main parameters, on the same device; unsharded if gradients are
/// replicated. They have bytes from the first reduction to zero_grad(). Reducer fills and frees them.
struct UnitMainGradient {
  std::vector<at::Tensor> parts;  ///< Views of `buffer`: per sub-buffer, 1-D.
  bool valid = false;             ///< Whether gradients have been reduced since zero_grad().
  Buffer buffer;
  std::shared_ptr<c10::DataPtr> memory;  ///< The memory of `buffer`.
  /// The memory, if gradients of a device are kept in host memory. It is kept for the next gradients, because pinning takes long.
  std::shared_ptr<c10::DataPtr> host_memory;
};

/// Consecutive pieces of every sub-buffer.
struct Pieces {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Returns the part for `pieces` of a tensor that holds the pieces `held`, of any number of elements each.
at::Tensor region(const at::Tensor& tensor, Pieces held, Pieces pieces);

/// The parameters that are gathered, freed and reduced together, and all memory that belongs to them, except gradients that are not reduced
/// yet (GradientAccumulator). A unit is plain state: Engine moves the parameters, and Reducer the gradients.
///
/// The layout cuts each sub-buffer into equal pieces, inner_size * outer_size of them. Rank (outer o, inner r) owns piece r * outer_size +
/// o; the shards of inner rank r are the outer_size pieces from r * outer_size on. Or it cuts inner_size pieces, one per inner rank: the
/// cuts are then the same with and without replicas, as DTensors require, and the outer ranks reduce complete shards.
struct Unit {
  /// `formats`: one per sub-buffer of the layout.
  Unit(std::string name, std::vector<UnitParameter> parameters, layout::UnitLayout layout, std::vector<SubBufferFormat> formats,
       UnitOptions options, UnitCommunicators communicators, c10::Storage storage);

  std::string name;
  std::vector<UnitParameter> parameters;
  layout::UnitLayout layout;
  std::vector<SubBufferFormat> formats;
  UnitOptions options;
  /// [Alone] One rank has everything, and computes with its main parameters as they are: the unsharded parameters are the main ones, and
  /// the placements no_shard, whatever the options are.
  const bool alone;
  UnitCommunicators communicators;
  std::uint64_t layout_hash = 0;  ///< A hash of describe() and of where the parameters lie.
  UnitPlace place;
  WholeParameters whole;
  InnerShards shards;
  UnitMain main;
  UnitMainGradient main_gradient;
  Attendance attendance;
  /// The object that connects the unit with its trigger (paging or hooks); released with the unit.
  std::shared_ptr<void> trigger;

  ParameterState state() const { return state_; }
  /// Throws Error if the transition is none of ParameterState's.
  void set_state(ParameterState state);

  /// Returns the label of a collective of this unit.
  comm::Label label(const char* operation) const;
  /// Returns the text about the parameters that ranks compare, with a line for each.
  std::string describe() const;
  /// Gives the unit and its parameters new names. Do not call it while a collective is under way.
  void rename(std::string unit, std::vector<std::string> parameter_names);
  bool trainable() const { return layout.trainable_sub_buffers() > 0; }
  bool replicated_parameters() const { return options.placements.parameters == Placement::kReplicated; }
  /// True if the main parameters, main gradients and optimizer state lie in host memory.
  bool offloaded() const { return options.offload == Offload::kAll; }
  /// True if this rank has the unsharded main gradients on the device (a shard over one rank is unsharded, too). Host memory holds only the
  /// gradients that this rank's optimizer needs.
  bool replicated_gradients() const {
    return !offloaded() && (options.placements.gradients == Placement::kReplicated ||
                            (communicators.gather->size() == 1 && !options.outer_sharded_optimizer));
  }
  bool replicated_optimizer() const { return options.placements.optimizer == Placement::kReplicated; }
  /// True if the main parameters of sub-buffer k are a region of the unsharded ones (or of `shards`), so that the bytes exist only once.
  /// Beside differences they are not, so that a write to the memory of the unsharded parameters is never one to main parameters.
  bool main_is_shared(std::size_t k) const {
    const bool may_share = !offloaded() && !sends_differences();
    return may_share && formats[k].gathers_main() && (replicated_parameters() || options.outer_sharded_optimizer);
  }
  /// True if the unsharded parameters of some sub-buffer do not have the same bits as its main parameters, or if the main parameters are
  /// not on the device.
  bool has_separate_main() const;
  /// True if gathers send differences of some sub-buffer.
  bool sends_differences() const;
  /// Returns the gather format in which the next gather sends sub-buffer k; null if it sends the values in the compute dtype.
  const GatherFormat* format_to_send(std::size_t k) const {
    const auto& format = formats[k];
    return format.sends_differences() && !whole.is_base ? nullptr : format.gather.get();
  }
  /// Throws Error if operators can't write to the unsharded parameters. Call it before they do.
  void check_writable() const;
  /// The number of elements of a piece of sub-buffer k as gathers send it: its own elements, or the bytes of its gather format.
  std::int64_t travelling_numel(std::size_t k) const;

  Pieces all_pieces() const { return {0, layout.world_size()}; }
  /// The pieces of this inner rank, which an inner all-gather sends, and an inner reduce-scatter returns.
  Pieces inner_pieces() const {
    const auto count = layout.world_size() / communicators.gather->size();
    return {communicators.gather->rank() * count, count};
  }
  /// True if the outer ranks cut a shard between them.
  bool outer_cuts() const { return layout.world_size() > communicators.gather->size(); }
  /// The pieces that belong to this rank alone. (If the outer ranks do not cut shards, all replicas have the same ones.)
  Pieces own_pieces() const { return {inner_pieces().first + (outer_cuts() ? communicators.outer_rank() : 0), 1}; }
  /// The pieces that `main` holds, which the optimizer of this rank updates.
  Pieces main_pieces() const;
  /// The pieces that users get as this rank's shard: if main parameters are replicated, the inner rank's part.
  Pieces shard_pieces() const { return options.outer_sharded_optimizer ? own_pieces() : inner_pieces(); }

  /// Returns a parameter as a view of the given unsharded sub-buffers.
  at::Tensor whole_parameter(std::span<const at::Tensor> sub_buffers, std::size_t parameter) const;
  /// `pieces` of the main parameters, or gradients, of sub-buffer k, which must be among main_pieces().
  at::Tensor main_region(const at::Tensor& main_or_gradient, Pieces pieces) const {
    return region(main_or_gradient, main_pieces(), pieces);
  }
  /// The place of a parameter in main.parts[sub_buffer] and main_gradient.parts[sub_buffer].
  struct MainSlice {
    std::size_t sub_buffer;
    std::int64_t offset;  ///< In main.parts[sub_buffer], elements.
    std::int64_t numel;
    std::int64_t parameter_offset;  ///< The position of the first element in the flattened parameter.
  };
  MainSlice main_slice(std::size_t parameter) const { return slice(parameter, main_pieces()); }
  /// The part of main_slice that lies in `pieces`.
  MainSlice slice(std::size_t parameter, Pieces pieces) const;
  /// The factor by which a reduction multiplies the sum of the ranks' gradients.
  double gradient_scale() const;

  /// Allocates the persistent memory, set to zero: that of the main parameters, and of `shards` or replicated parameters. Memory that
  /// exists already (main.memory and others) is used as it is.
  void allocate_main(memory::Accounting& accounting);

 private:
  ParameterState state_ = ParameterState::kSharded;
};

/// True if `inner` is `outer` or lies within it.
bool encloses(const Unit& outer, const Unit& inner);

/// True if one unit encloses the other, or has called it. While one of them is in use, the other may be, too [Evict by movement].
bool related(const Unit& a, const Unit& b);

}  // namespace fsdp::engine
