#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/unit.h"
#include "fsdp/device_mesh.h"
#include "fsdp/gather_format.h"

namespace fsdp::hooks {

class HookedModel;

/// One parameter of a unit, as a front end passes it.
struct ParameterSpec {
  std::string name;
  std::vector<std::int64_t> shape;  ///< The shape that a module on one rank would have.
  std::int64_t shard_dim =
      0;  ///< The dimension along which it is cut as torch.chunk cuts: equal numbers of rows, with fewer or none on the last ranks.
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  /// UnitSpec::param_dtype for this parameter alone.
  std::optional<at::ScalarType> param_dtype = {};
  /// The dtype of the gradient that its shard gets. If the unit has no reduce_dtype, the gradient is also sent in this dtype. Without a
  /// value, the unit's options determine both dtypes.
  std::optional<at::ScalarType> grad_dtype = {};
  /// The format in which it is gathered, or null. This requires that it is cut along the first dimension, and that each row is a whole
  /// number of blocks.
  std::shared_ptr<const GatherFormat> gather_format = {};
  bool extended = false;  ///< Whether the unit's extension gathers it. Only its gradients then lie in the unit's buffers.
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  DeviceMesh mesh;  ///< One dimension to shard over, or two: the first replicates (HSDP), or cuts shards once more (HFSDP).
  engine::UnitOptions options;
  std::optional<at::ScalarType> param_dtype;   ///< The dtype of the unsharded parameters in forward and backward; by default their own.
  std::optional<at::ScalarType> reduce_dtype;  ///< The dtype in which gradients are sent; by default the dtype in which they are computed.
  std::int64_t post_forward_size = 0;
  bool separate_reduce_group = false;
  bool rounds_gradients = true;  ///< Whether sums of gradients, which are made in fp32, are rounded to reduce_dtype, as FSDP2's are.
};

/// A unit whose parameters have two forms: *shards*, tensors of this rank's rows over the main parameters, and *unsharded* tensors over the
/// gathered memory. It is made before its model's engine, to which it is added when the first forward determines the root.
///
/// Each parameter has a sub-buffer of its own with row granularity, so that a gathered one is contiguous and its padding lies behind it.
class HookedUnit : public std::enable_shared_from_this<HookedUnit> {
 public:
  /// Collective over the mesh, if it makes communicators of its own.
  explicit HookedUnit(UnitSpec spec);
  virtual ~HookedUnit() = default;
  HookedUnit(const HookedUnit&) = delete;
  HookedUnit& operator=(const HookedUnit&) = delete;

  const UnitSpec& spec() const { return spec_; }
  engine::Unit& unit() { return *unit_; }
  const engine::Unit& unit() const { return *unit_; }

  /// Sets the names of the unit and its parameters in errors and profiles: fully qualified, after the root is known, and the same on all
  /// ranks. Do not call it while a collective is under way.
  void rename(std::string name, std::vector<std::string> parameters);
  /// Sets other communicators over the same ranks. Do not call it while a collective is under way.
  void set_mesh(const DeviceMesh& mesh);
  /// Gives reductions a process group of their own, or the one of gathers again. Collective over the mesh.
  void set_separate_reduce_group(bool separate);

  /// Gathers the extended parameters from now on.
  void set_extension(std::shared_ptr<engine::GatherExtension> extension) { unit_->whole.extension = std::move(extension); }

  /// From now on no copy stays on the post-forward mesh. Do not call it while there is one.
  void drop_post_forward_mesh();
  /// See engine::UnitOptions::fixed_addresses.
  void set_fixed_addresses(bool fixed);

  /// Returns the number of rows, or slices along shard_dim, of parameter i that this rank owns.
  std::vector<std::int64_t> shard_shape(std::size_t i) const;
  /// Allocates the main parameters, set to zero.
  void allocate();
  bool allocated() const { return !shards_.empty() || spec_.parameters.empty(); }
  /// This rank's part of parameter i, over the main parameters; the memory lives as long as the tensor. Always the same tensor. Needs
  /// allocate(). Undefined for an extended parameter.
  const at::Tensor& shard(std::size_t i) const;
  /// Shards may have other memory than the main parameters, because the memory of a storage can be exchanged (share_memory_(), a queue of
  /// torch.multiprocessing). The values of such shards are copied to the main parameters. Returns true if a shard got other memory since
  /// the last call.
  bool take_exchanged_memory();
  /// Ties parameter i to one of another unit: from now on it has that parameter's `shard`, which take_exchanged_memory() copies to the main
  /// parameters. An undefined tensor ends the tie. Needs allocate().
  void tie(std::size_t i, const at::Tensor& shard);
  /// Returns the unsharded parameter i. Its memory exists only while the unit is gathered.
  at::Tensor whole(std::size_t i) const;
  /// Returns this rank's part of parameter i on the post-forward mesh, in the given shape. Its memory exists only while there is a copy.
  /// The parts are equal and in the order of the elements.
  at::Tensor post_forward_shard(std::size_t i, const std::vector<std::int64_t>& shape) const;
  /// The tensor that is registered on modules as the unsharded parameter i, and into which autograd accumulates: over the memory of
  /// whole(i).
  void set_leaf(std::size_t i, const at::Tensor& leaf);
  /// Returns a tensor of parameter i's unsharded shape in the order of its elements in the unit's memory, which the engine takes as a
  /// gradient.
  at::Tensor as_stored(std::size_t i, const at::Tensor& whole) const;
  /// Returns the gradient of parameter i among those that MainParameters::take_gradients returned, in the shape of its shard. It shares
  /// their memory.
  at::Tensor gradient_shard(const std::vector<at::Tensor>& gradients, std::size_t i) const;

  /// Returns a tensor without elements. The engine increments its version whenever main parameters have been written, so that the unit's
  /// extension notices that its copies are stale. The engine treats it as the parameter's leaf, so it is on the same device as a leaf.
  at::Tensor watch_writes(std::size_t i);
  /// Gathers pairs (whole, part) of the unit's extension, and waits for them. Call it only while the extension starts: the engine's lock is
  /// held then, and the unit's own gather has not begun.
  void gather_now(const std::vector<std::pair<at::Tensor, at::Tensor>>& given, bool outer) const;

  /// Called on any thread when backward has entered the unit: registers the unsharded parameters on the modules.
  virtual void entered_by_backward() {}

  /// False if backward does not need the values of the parameters.
  bool gathered_in_backward = true;

  /// The running backward has entered the unit, or repeated its forward.
  bool entered_in_backward = false;
  /// The running backward gave it a gradient. This may be before backward enters it, if an operator outside of its modules used a weight.
  bool got_gradient_in_backward = false;

  /// The number of steps of optimizers that have parameters of this unit.
  std::uint64_t steps = 0;
  /// The running backward belongs to a forward after which such a step has taken place.
  bool stale_in_backward = false;

  /// The model that has the unit; null if none has. It is not kept alive.
  std::shared_ptr<HookedModel> model() const { return model_.lock(); }
  /// Returns the model. Throws Error if no model has it.
  std::shared_ptr<HookedModel> require_model() const;
  /// Called when a model adds the unit.
  std::unique_ptr<engine::Unit> release(std::weak_ptr<HookedModel> to);
  /// Called when the model has released it.
  void take_back(std::unique_ptr<engine::Unit> unit);

 private:
  at::Tensor make_shard(std::size_t i) const;
  static at::Tensor view_of(const at::Tensor& memory, std::int64_t byte_offset, at::ScalarType dtype,
                            const std::vector<std::int64_t>& shape);

  UnitSpec spec_;
  std::unique_ptr<engine::Unit> owned_;  ///< While no model has it.
  engine::Unit* unit_ = nullptr;
  std::weak_ptr<HookedModel> model_;
  std::vector<at::Tensor> shards_;
  std::vector<const void*> homes_;  ///< For each shard, the address of its main parameters.
  std::vector<const void*> seen_;   ///< For each shard, the address of its memory when it was last looked at.
};

}  // namespace fsdp::hooks
