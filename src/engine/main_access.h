#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <future>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/unit.h"

namespace fsdp::engine {

class Engine;

/// What optimizers, checkpoints and users do between steps with what this rank owns of a model: its main parameters and main gradients.
/// Engine::main() makes one. Each method takes the engine's lock once, and its errors tell which units the rank touched last.
class MainAccess {
 public:
  explicit MainAccess(Engine& engine) : engine_(engine) {}

  // Main parameters.

  /// Throws Error if a parameter was given other memory than the engine's, so that updates would not reach it.
  void check_parameters() const;
  /// Writes back what operators have written to present parameters, and waits for gathers that still read the main parameters. Throws Error
  /// if the engine has been retired, or the main parameters are torn.
  void flush_writes() const;
  /// The same as flush_writes, but allows torn main parameters, because all of them will be replaced.
  void prepare_load() const;
  /// Call after flush_writes: somebody reads the main parameters and the optimizer's state until `read` is ready. What writes them waits
  /// for that [Writers wait for the reader], and so do flush_writes and prepare_load, which come before users' own writes. If it is
  /// `thread` that ends the reading, its own writes throw Error, because they would wait for ever.
  void set_reader(std::future<void> read, std::thread::id thread = {}) const;
  /// From now on users have views of the main parameters, and may write through them at any time.
  void expose() const;
  bool is_exposed() const;
  /// Marks the main parameters as torn: a load is about to replace the values of these names, so they are partly one model's and partly
  /// another's. The next forward, summon and flush_writes then throw Error. An empty set says that a load has replaced all torn values.
  void set_torn(std::set<std::string> names) const;
  /// The names whose values failed loads may have replaced.
  std::set<std::string> torn() const;
  /// True if nothing is lost where the main parameters are overwritten: nobody has written them since the model was sharded, or they are
  /// torn.
  bool may_be_lost() const;
  /// Gathers `main`, which holds this rank's pieces of a unit's main parameters or main gradients. Returns the whole sub-buffers as new
  /// tensors. Collective.
  std::vector<at::Tensor> gather_main(Unit& unit, std::span<const at::Tensor> main) const;
  /// Does the same as gather_main for the main parameters. The user keeps the result until dismiss; meanwhile backwards and flush_writes
  /// throw Error.
  std::vector<at::Tensor> summon(Unit& unit) const;
  /// Takes back what summon gave. Unless `whole` is empty, this rank's pieces of it become its main parameters, which have then changed.
  void dismiss(Unit& unit, std::span<const at::Tensor> whole) const;
  /// An operator wrote to the unit's present parameters: the owned slices are written back before they are evicted.
  void wrote(Unit& unit) const;
  /// The main parameters were written: present copies are outdated, and the parameters' versions are bumped, so that backward through an
  /// older graph raises torch's in-place error. `forward_begins`: a forward of the whole model begins now, which gathers over the outer
  /// dimension itself.
  void changed(bool forward_begins = false) const;
  /// The same, after users have written this rank's shards of the main parameters. If main parameters are replicated, ranks get each
  /// other's shards, and the call is collective.
  void shards_changed() const;
  /// Says that the model has been un-sharded. Calls that need its parameters throw Error from now on.
  void retire() const;
  bool is_retired() const;
  /// An optimizer updates with these settings from now on ("lr 0.1, eps 1e-08"): they travel with the collectives that follow, for ranks to
  /// compare. `by`: its number in this process; optimizers have been made in the same order on all ranks.
  void tell_update(std::uint64_t by, std::string settings) const;
  /// Call it before memory is freed that the model's work has used on other streams than that of its allocation.
  void rejoin_streams() const;
  /// Runs `work` while nobody else uses the engine. For collectives on the units' communicators that are no part of a step.
  void exclusively(const std::function<void()>& work) const;
  /// Whole weights are being exported. `end` ends that, on all ranks, and returns the text of an Error: whoever uses the model first calls
  /// it, under the engine's lock, and throws the error. An empty function: the export has ended. Call it within exclusively().
  void set_export(std::function<std::string()> end) const;
  /// Throws Error if an export was left open, which has then ended.
  void refuse_export() const;

  // Main gradients.

  /// Waits for the reductions that a backward left under way.
  void finish_gradient_sync() const;
  /// Gives the unit's main gradients away, one 1-D tensor per trainable sub-buffer, all over one storage that owns its memory: afterwards
  /// the unit has none, as after zero_grad(). Empty if nothing was reduced. Hooks use it, because their users own the gradients. Call it
  /// between backwards, when no reduction is under way.
  std::vector<at::Tensor> take_gradients(Unit& unit) const;
  /// Drops them, reduced or not. Throws Error inside of a backward.
  void zero_grad() const;

 private:
  Engine& engine_;
};

}  // namespace fsdp::engine
