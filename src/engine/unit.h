#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/placements.h"
#include "layout/unit_layout.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// Where a unit's whole parameters are. Transitions, all made by Engine:
///   kSharded -> kGathering  an all-gather was started (read ahead, or about to be used)
///   kGathering -> kPresent  it completed
///   kPresent -> kSharded    evicted; or, for replicated parameters, outdated by an optimizer step
///   kGathering -> kSharded  a read-ahead that nobody used, or reset
enum class ParameterState : std::uint8_t { kSharded, kGathering, kPresent };

/// Where a unit's gradients of the running backward are. Transitions, all made by Reducer:
///   kNone -> kCollecting      the first gradient arrived in a fresh buffer
///   kCollecting -> kReducing  the reduce-scatter was started
///   kReducing -> kNone        it completed: main gradients hold the result, the buffer is free
///   kCollecting -> kNone      dropped by reset
enum class GradientState : std::uint8_t { kNone, kCollecting, kReducing };

/// One parameter of a unit. The engine never keeps a parameter alive: its tensors belong to the modules.
struct UnitParameter {
  std::string name;          ///< Fully qualified.
  std::size_t position = 0;  ///< In the model's named_parameters().
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor{at::Tensor().getIntrusivePtr()};

  at::Tensor gradient_view;    ///< Its place in the unreduced gradients, in its shape; trainable only.
  bool gradient_seen = false;  ///< A gradient of this rank is in the unreduced buffer.
  bool contributed = false;    ///< This rank had a gradient since ranks last told each other.
  bool has_gradient = false;   ///< Some rank had a gradient since zero_grad(): the optimizer updates it.
};

struct UnitOptions {
  Placements placements;
  bool reshard_after_forward = true;
};

/// The parameters that are gathered, freed and reduced together, and all memory that belongs to them. Plain state: Engine moves the
/// parameters, Reducer the gradients.
struct Unit {
  Unit(std::string name, std::vector<UnitParameter> parameters, layout::UnitLayout layout, UnitOptions options,
       std::shared_ptr<comm::Communicator> communicator, c10::Storage storage);

  std::string name;
  std::vector<UnitParameter> parameters;
  layout::UnitLayout layout;
  UnitOptions options;
  std::shared_ptr<comm::Communicator> communicator;
  Unit* parent = nullptr;  ///< The closest enclosing unit; null for the root.
  std::size_t index = 0;   ///< Position in Engine::units().

  // Whole parameters. `storage` is what the modules' parameters view; it has bytes only while gathering or present
  // (always, if parameters are replicated).
  ParameterState state = ParameterState::kSharded;
  std::atomic<bool> hot = false;  ///< Present, and touching it changes nothing: the only thing the fast path reads.
  bool written = false;           ///< An operator wrote to the whole parameters: eviction writes the owned slices back.
  c10::Storage storage;
  memory::Slot slot;
  std::vector<at::Tensor> full;  ///< Per sub-buffer, 1-D views of `storage`.
  std::unique_ptr<comm::Pending> gather;

  // Main parameters and gradients, per sub-buffer, 1-D: the shard, or the whole if the optimizer's placement is replicated. Replicated
  // parameters' mains are regions of `full`: the shard's bytes exist once.
  at::Tensor main_memory;  ///< Bytes; undefined if the parameters are replicated.
  std::vector<at::Tensor> main;
  c10::Storage main_gradient_storage;  ///< The whole if gradients are replicated. Has bytes from the first reduction to zero_grad().
  std::shared_ptr<c10::DataPtr> main_gradient_memory;
  std::vector<at::Tensor> main_gradient;  ///< Trainable sub-buffers only; views of `main_gradient_storage`.
  bool main_gradient_valid = false;       ///< Something was reduced since zero_grad().

  // Unreduced gradients.
  GradientState gradient_state = GradientState::kNone;
  c10::Storage gradient_storage;
  memory::Slot gradient_slot;
  std::vector<at::Tensor> unreduced;  ///< Per trainable sub-buffer, 1-D views of `gradient_storage`.
  std::vector<at::Tensor> padding;    ///< The stretches of `gradient_storage` that belong to no parameter.
  bool collects_in_place = false;     ///< `gradient_storage` has the main gradients' bytes.
  c10::Storage staging_storage;
  memory::Slot staging_slot;
  std::vector<at::Tensor> staging;  ///< Per trainable sub-buffer, 1-D views of `staging_storage`.
  std::unique_ptr<comm::Pending> reduction;
  bool collected_in_this_backward = false;
  bool reduced_in_this_backward = false;
  bool late = false;  ///< Gradients arrive after backward departed from it (a shared parameter): reduced at the end of backward.

  /// What binds the unit to its trigger (paging, hooks); released with the unit.
  std::shared_ptr<void> trigger;

  bool replicated_parameters() const { return options.placements.parameters == Placement::kReplicated; }
  bool replicated_gradients() const { return options.placements.gradients == Placement::kReplicated; }
  bool replicated_optimizer() const { return options.placements.optimizer == Placement::kReplicated; }
  std::int64_t main_gradient_bytes() const { return replicated_gradients() ? layout.trainable_bytes() : layout.trainable_shard_bytes(); }
  /// Takes the bytes from `storage`, and gives them back to the pool if they came from there.
  void free_whole();
  /// Parameter i, whole, as a view of `storage`: valid while the unit is present.
  at::Tensor whole(std::size_t parameter) const;
  /// This rank's region of a whole sub-buffer.
  at::Tensor own_region(const at::Tensor& whole, std::size_t sub_buffer) const;
  /// Where parameter i lies in main[sub_buffer] and main_gradient[sub_buffer].
  struct MainSlice {
    std::size_t sub_buffer;
    std::int64_t offset;  ///< In main[sub_buffer], elements.
    std::int64_t numel;
    std::int64_t parameter_offset;  ///< Of the first element, in the flattened parameter.
  };
  MainSlice main_slice(std::size_t parameter) const;
  /// The part of main_slice that this rank owns: different only where the optimizer is replicated.
  MainSlice owned_slice(std::size_t parameter) const;

 private:
  void collect_padding();
};

/// True if `inner` is `outer` or lies within it.
bool encloses(const Unit& outer, const Unit& inner);

/// True if one encloses the other.
bool related(const Unit& a, const Unit& b);

}  // namespace fsdp::engine
