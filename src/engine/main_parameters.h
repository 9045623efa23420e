#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "engine/unit.h"

namespace fsdp::engine {

class Engine;

/// Whether a model's main parameters may be used. Transitions:
///   kInitial -> kWhole  by changed(), when an optimizer or a user has written them; by expose(), because users may write them from then on
///   any -> kTorn        set_torn, while a load replaces them
///   kTorn -> kWhole     set_torn with no names, when a load has succeeded
///   any -> kRetired     retire, when the model has been un-sharded
enum class MainState : std::uint8_t {
  kInitial,  ///< They have the values that the model had when it was sharded.
  kWhole,
  kTorn,     ///< They are partly one model's and partly another's.
  kRetired,  ///< The model no longer uses them.
};

/// Access of optimizers, checkpoints and users, between steps, to this rank's main parameters and main gradients. Engine::main() returns
/// it. Each public method locks the engine once. Errors of a collective name the units that the rank used last.
class MainParameters {
 public:
  explicit MainParameters(Engine& engine) : engine_(engine) {}

  // Main parameters.

  /// Throws Error if a parameter was given other memory than the engine's, so that updates would not reach it.
  void check_parameters();
  /// Writes back what operators have written to present parameters, and waits for gathers that still read the main parameters. Throws Error
  /// if the engine has been retired, or the main parameters are torn.
  void flush_writes();
  /// Does the same as flush_writes, but allows torn main parameters, because all of them will be replaced.
  void prepare_load();
  /// Call it after flush_writes, when a reader uses the main parameters and the optimizer's state until `read` is ready. Writers wait for
  /// the reader [Writers wait for the reader], and so do flush_writes and prepare_load, which precede users' own writes. If `thread` is the
  /// one that ends the reading, its own writes throw Error, because they would wait for ever.
  void set_reader(std::future<void> read, std::thread::id thread = {});
  /// From now on users have views of the main parameters, and may write through them at any time.
  void expose();
  bool is_exposed();
  /// Marks the main parameters as torn: a load is about to replace the values of these names, so they are partly one model's and partly
  /// another's. The next forward, summon and flush_writes then throw Error. An empty set means that a load has replaced all torn values.
  void set_torn(std::set<std::string> names);
  /// The names whose values failed loads may have replaced.
  std::set<std::string> torn();
  /// True if the main parameters can be overwritten without loss: they were not written since the model was sharded, or they are torn.
  bool may_be_lost();
  /// Gathers `main`, which holds this rank's pieces of a unit's main parameters or main gradients. Returns the unsharded sub-buffers as new
  /// tensors. Collective.
  std::vector<at::Tensor> gather_main(Unit& unit, std::span<const at::Tensor> main);
  /// Does the same as gather_main for the main parameters. The user keeps the result until dismiss; meanwhile backwards and flush_writes
  /// throw Error.
  std::vector<at::Tensor> summon(Unit& unit);
  /// Ends summon. Unless `whole` is empty, this rank's pieces of it become its main parameters, which have then changed.
  void dismiss(Unit& unit, std::span<const at::Tensor> whole);
  /// An operator wrote to the unit's present parameters: the owned slices are written back before they are evicted.
  void wrote(Unit& unit);
  /// The main parameters were written: present copies become stale, and the parameters' versions are incremented, so that backward through
  /// an older graph raises torch's in-place error. `forward_begins`: a forward of the whole model begins now, which gathers over the outer
  /// dimension itself.
  void changed(bool forward_begins = false);
  /// Call it before changed() if anything else than an optimizer's step wrote the main parameters: the next gather sends no differences
  /// [Differences need a base].
  void send_values();
  /// Does the same as changed(), after users have written this rank's shards of the main parameters. If main parameters are replicated,
  /// ranks get each other's shards, and the call is collective.
  void shards_changed();
  /// Call it when the model has been un-sharded. Calls that need its parameters throw Error from now on.
  void retire();
  bool is_retired();
  /// An optimizer updates with these settings from now on ("lr 0.1, eps 1e-08"): they are sent with the collectives that follow, and ranks
  /// compare them. `by`: its number in this process; optimizers are made in the same order on all ranks.
  void tell_update(std::uint64_t by, std::string settings);
  /// Call it before memory is freed that the model's work has used on other streams than that of its allocation.
  void rejoin_streams();
  /// Runs `work` while no other thread uses the engine. For collectives on the units' communicators that are not a part of a step.
  void exclusively(const std::function<void()>& work);
  /// Unsharded weights are being exported. `end` ends the export, on all ranks, and returns the text of an Error: the next use of the model
  /// calls it, under the engine's lock, and throws the error. An empty function: the export has ended. Call it within exclusively().
  void set_export(std::function<std::string()> end);
  /// Throws Error if an export was left open, which has then ended.
  void refuse_export();

  // Main gradients.

  /// Waits for the reductions that a backward left under way.
  void finish_gradient_sync();
  /// Moves the unit's main gradients to the caller, one 1-D tensor per trainable sub-buffer, all over one storage that owns its memory:
  /// afterwards the unit has none, as after zero_grad(). Empty if nothing was reduced. Hooks use it, because their users own the gradients.
  /// Call it between backwards, when no reduction is under way.
  std::vector<at::Tensor> take_gradients(Unit& unit);
  /// True if backwards have left gradients, reduced or not, that were not taken. A backward that ended with an exception leaves none,
  /// because the engine recovers first. Call it between backwards.
  bool has_left_gradients();
  /// Drops them, reduced or not. Throws Error inside of a backward.
  void zero_grad();

 private:
  friend class Engine;  // It calls the methods below under its lock.

  void note_change();
  /// Throws Error if the main parameters are in that state.
  void refuse_torn() const;
  void refuse_retired() const;
  /// Throws Error while a unit is summoned; `what` is refused.
  void refuse_summoned(const char* what) const;
  /// Throws Error if a parameter was given other memory than the engine's.
  void validate() const;
  bool is_summoned(const Unit& unit) const { return summoned_.contains(&unit); }

  /// Releases the lock until the reader of the main parameters has ended; the reader may use the engine meanwhile [Writers wait for the
  /// reader]. Throws Error if the calling thread is the reader.
  std::unique_lock<std::mutex> after_reader(std::unique_lock<std::mutex> held);
  void write_back_all();

  Engine& engine_;
  MainState state_ = MainState::kInitial;
  std::set<std::string> torn_;
  std::unordered_set<const Unit*> summoned_;  // units whose whole main parameters the user holds (SummonFullParams)
  std::shared_future<void> read_;             // invalid if there is no reader
  std::thread::id reader_thread_;             // the thread that ends the reading, if it may write, too
  pid_t reader_process_ = 0;                  // the process of this thread: a fork copies this object, but not the thread
  bool exposed_ = false;
};

}  // namespace fsdp::engine
