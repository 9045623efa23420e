#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/buffer_pools.h"
#include "engine/gatherer.h"
#include "engine/main_parameters.h"
#include "engine/memory_choice.h"
#include "engine/one_stream.h"
#include "engine/reducer.h"
#include "engine/schedule.h"
#include "engine/step_events.h"
#include "engine/step_observer.h"
#include "engine/unit.h"
#include "events/event_ring.h"
#include "fsdp/device_mesh.h"
#include "fsdp/error.h"
#include "memory/accounting.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// Whether a backward is running. Transitions:
///   kNone -> kRunning   begin_backward, at the first entry or gradient of a backward
///   kRunning -> kNone   end_backward, or reset after an exception has ended the backward
enum class BackwardState : std::uint8_t { kNone, kRunning };

/// Whether a backward is for all leaves, or for chosen tensors (torch::autograd::grad, backward with inputs). A backward for chosen tensors
/// passes through units to whose parameters it gives no gradients. It therefore reduces no unit when it leaves it, but all gradients at its
/// end.
enum class BackwardOf : std::uint8_t { kAllLeaves, kChosenTensors };

struct EngineOptions {
  DeviceMesh mesh;             ///< All ranks that share the model.
  DeviceMesh tensor_parallel;  ///< The ranks that hold other pieces of its parameters, in one dimension; undefined if there are none.
  std::uint64_t model = 0;     ///< The model's number, which is the same on all ranks, and belongs to no other model on any of them.
  int prefetch_depth = 1;      ///< In the beginning.
  std::int64_t keep_gathered_bytes = 0;
  bool report_nan_in_param_grad = false;
  std::shared_ptr<MemoryChoice> memory_choice = {};           ///< Null if there was no memory budget.
  std::uint32_t events_source = events::new_source("model");  ///< The source of the engine's events (events/event.h); 0: it has none.

  c10::Device device() const { return mesh.device(); }
  /// True if the mesh's devices are CPUs, or, in a plan, stand for them.
  bool on_cpu() const { return mesh.device_type() == c10::kCPU; }
  /// Ranks outside of the mesh (tensor-parallel ones) may hold the same values of a parameter as this rank. True on exactly one of all
  /// ranks that hold the same values, so that sums count them once.
  bool speaks_for(const UnitParameter& parameter) const {
    return parameter.tensor_parallel || !tensor_parallel.defined() || tensor_parallel.coordinate(tensor_parallel.dims().front().name) == 0;
  }
};

/// Settings that users may change from step to step. A setting without a value is not changed.
struct StepSettings {
  std::optional<int> prefetch_depth = {};
  std::optional<bool> is_last_backward = {};     ///< With false, the end of a backward leaves reductions under way.
  std::optional<bool> ends_step = {};            ///< With false, backwards that give gradients do not end a step of the reports.
  std::optional<bool> manual_finalization = {};  ///< With true, the ends of backwards reduce nothing: finalize_backward does, once for all.
  std::optional<bool> overlaps_reductions = {};  ///< With false, each reduction ends before backward continues.
  /// The kind of memory from which the engine's buffers come, if the process groups have it. Buffers in use move when they are next needed.
  /// Collective.
  std::optional<comm::BufferMemory> buffer_memory = {};
  std::optional<BufferSources> buffer_sources = {};
};

/// What a rank says about units that not all ranks use: see Engine::attend.
struct Attend {
  bool present = true;              ///< This rank uses them in this forward.
  bool divide_by_present = false;   ///< The same on all ranks.
  bool backward_may_follow = true;  ///< Without it, a backward may still follow if units were used in grad mode before.
};

/// One training step over units: gathers them when they are entered, evicts them when the computation has moved on, reduces their gradients
/// when backward leaves them. It knows neither modules nor languages: a trigger (paging, hooks) notifies it that a unit is about to be
/// used, that a gradient is ready, and that backward has begun and ended.
///
/// All public methods that change something lock, because a backward may run on another thread than the forward. Methods that do not lock
/// read values that never change; follows_current_stream() and knows_grad_mode() read an atomic. A thread holds the lock while it waits for
/// a collective, because nothing else could proceed then. Every rank must enter units in the same order [Order is collective].
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Adds a unit. Enclosing units are added before enclosed ones.
  Unit& add(std::unique_ptr<Unit> unit);
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  /// Releases the units, sharded and without unreduced gradients, to another engine. This engine can then no longer be used.
  std::vector<std::unique_ptr<Unit>> release();

  // Notifications of triggers.

  /// A forward of the whole model begins [Current when forward begins]. `kept_is_outdated`: whether copies that the user keeps by an option
  /// become stale as well. Units that unshard() has pinned do not become stale.
  void begin_forward(bool kept_is_outdated);
  /// Call it when a forward of the whole model has ended, if the trigger knows. Its results are then those of ranks that have made the same
  /// calls [Compared before it is used].
  void end_forward();
  /// Call it between forwards. Frees what an earlier forward has kept of the unit, as begin_forward does for all units.
  void refresh(Unit& unit, bool kept_is_outdated);
  /// The unit's modules begin to run: until they have ended, the unit is not evicted [Evict by movement]. They may nest. Paging does not
  /// call it. Hooks call it before enter().
  void begin_unit_forward(Unit& unit);
  /// The unit's modules have ended. Returns false if an outer forward of the same unit has not, so that its modules still run.
  bool end_unit_forward(Unit& unit);
  /// An operator is about to use all of these units at once [Present before use]. Within a backward, `pass` distinguishes operators of the
  /// backward proper from those of a forward that activation checkpointing repeats. Only the former count for [Reduce on departure].
  void enter(std::span<Unit* const> units, Pass pass);
  /// The unit's use has ended: leaves it now, and not only when another unit is entered.
  void leave_now(Unit& unit);
  /// Takes a gradient of this rank for one parameter, of any strides. Reading it must not touch a unit, because the engine's lock is held
  /// meanwhile.
  void gradient(Unit& unit, std::size_t parameter, const at::Tensor& gradient);
  /// A backward has begun, which holds `alive` until it has ended. If an exception ended the backward before, resets first [Nothing
  /// survives an exception]. Returns false, and changes nothing, if the backward is known already. If several threads call this, only one
  /// of them therefore announces a backward and its end.
  bool begin_backward(std::weak_ptr<void> alive, BackwardOf of);
  /// With manual finalization, reductions that have begun stay under way, and what is collected stays collected: see finalize_backward.
  void end_backward();
  /// Call it between backwards. Reduces all gradients that any rank has collected in units that require synchronization now, and continues
  /// reductions that backwards have left under way. With `wait`, all of them have ended when this returns; otherwise
  /// MainParameters::finish_gradient_sync waits for them. Collective. Throws Error inside of a backward.
  void finalize_backward(bool wait);
  /// True between begin_backward and end_backward, unless an exception has ended the backward.
  bool in_backward();
  /// True if operators of the current stream may use units in use without notifying the engine. Takes no lock.
  bool follows_current_stream() const { return stream_.is_current(); }
  /// True if a use of units in the current grad mode tells nothing new of whether a backward may follow: where not, the engine wants to be
  /// notified even of units in use. Takes no lock.
  bool knows_grad_mode() const { return backward_may_follow_ || !at::GradMode::is_enabled(); }
  /// Resets if an exception has ended a backward.
  void recover();

  // Calls of users.

  /// [Attendance is agreed] Call it on all ranks, in a forward, before any of them uses these units. Gathers them on the ranks that are
  /// present, unless all are. Not within a backward: what its repeated forwards use stays gathered. Throws Error if the ranks'
  /// `divide_by_present` differ, or the units have a gradient_divide_factor beside it.
  void attend(std::span<Unit* const> units, const Attend& attend);

  /// Gathers the unit, which then stays [Pins last until use]. Without `wait`, the gather has only begun: a second call waits for it.
  void unshard(Unit& unit, bool wait);
  void reshard(Unit& unit);
  /// Sets whether the unit's unsharded parameters keep their memory, and therefore their addresses, while they are resharded.
  void set_fixed_addresses(Unit& unit, bool fixed);
  void reset();
  void set(const StepSettings& settings);
  /// This rank's main parameters and main gradients, to read and write between steps.
  MainParameters& main() { return main_parameters_; }

  memory::Accounting& accounting() { return accounting_; }
  const EngineOptions& options() const { return options_; }

 private:
  friend class MainParameters;  // Its methods are the engine's, between steps.
  friend class Observation;
  friend std::vector<std::size_t> recorded_order(Engine& engine, Pass pass);

  void move_to(Unit& unit, std::span<Unit* const> together, Pass pass);
  void occupy(Unit& unit, Pass pass);
  void depart_to(Unit& destination, std::span<Unit* const> together, Pass pass);
  void attend_together(std::span<Unit* const> units, const Attend& attend);
  bool unshard_attended(Unit& unit);
  void gather_for(Unit& unit, std::vector<bool> receives);
  static bool may_gather_ahead(const Unit& unit) { return !unit.attendance.optional || unit.attendance.by_all; }
  void refresh_locked(Unit& unit, bool kept_is_outdated);
  void leave(Unit& unit);
  void read_ahead();
  void prefetch_listed(Unit& unit);
  void set_use(Unit& unit, UseState state);
  void evict(Unit& unit);
  void reshard_after_backward();
  void note_backward(bool last);
  void confirm() const;
  bool is_confirmed_later() const;
  void forget_moves();
  void outdate_all(bool starts_shards);
  void reset_locked();
  void drop_backward();
  /// Locks the mutex. Every public method that changes something begins with it.
  std::unique_lock<std::mutex> lock();
  /// Locks it for methods that make collectives, or precede writes to main parameters. Throws Error if an export was left open, which has
  /// then ended.
  std::unique_lock<std::mutex> lock_for_use() {
    auto held = lock();
    if (end_export_) throw Error(std::exchange(end_export_, {})());
    return held;
  }
  [[noreturn]] void rethrow_with_history(const std::exception& error) const;
  template <typename Body>
  void guarded(const Body& body);

  // Serializes forward, backward (which autograd may run on another thread) and the optimizer.
  std::mutex mutex_;
  const EngineOptions options_;
  int prefetch_depth_;
  OneStream stream_;
  ModelFacts facts_;
  memory::Accounting accounting_;
  StepEvents events_;
  BufferPools pools_;
  std::vector<std::unique_ptr<Unit>> units_;  // after the pools: slots must not outlive them
  Gatherer gatherer_;
  Reducer reducer_;
  MainParameters main_parameters_;
  Schedule schedule_;
  StepObserver* observer_ = nullptr;  ///< Null except while an Observation exists.
  Unit* current_ = nullptr;
  // [A move costs the same however many units there are] The only units that entering a unit has to look at: those that the computation is
  // in (or forward was in when backward began), and those that are being gathered on a prediction.
  std::vector<Unit*> occupied_;
  std::vector<Unit*> running_;  ///< The units whose modules run now, the outermost first.
  std::vector<Unit*> ahead_;
  /// [Attendance is agreed] Units were used in grad mode since the last backward.
  std::atomic<bool> backward_may_follow_ = false;
  BackwardState backward_ = BackwardState::kNone;
  std::weak_ptr<void> backward_alive_;
  std::function<std::string()> end_export_;
  bool adds_to_gradients_ = false;  // the running backward adds to gradients of earlier backwards
};

template <typename Body>
void Engine::guarded(const Body& body) {
  try {
    body();
  } catch (const CommError& error) {
    rethrow_with_history(error);
  }
}

}  // namespace fsdp::engine
