#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <sys/types.h>

#include <cstdint>
#include <future>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "engine/gatherer.h"
#include "engine/unit.h"

namespace fsdp::engine {

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

/// Controls the access of optimizers, checkpoints and users to the main parameters of all units, and which of them must wait for others.
/// Called by Engine and MainAccess, under the engine's lock.
class MainParameters {
 public:
  /// `units` and `gatherer`: the engine's.
  MainParameters(c10::Device device, const std::vector<std::unique_ptr<Unit>>& units, Gatherer& gatherer)
      : device_(device), units_(units), gatherer_(gatherer) {}

  /// Says that a load is about to replace the values of these names. An empty set says that it has replaced all torn values.
  void set_torn(std::set<std::string> names);
  /// The names whose values failed loads may have replaced.
  const std::set<std::string>& torn() const { return torn_; }
  void changed();
  /// True if overwriting the main parameters loses nothing, because they have their initial values or are torn.
  bool may_be_lost() const;
  void retire() { state_ = MainState::kRetired; }
  bool is_retired() const { return state_ == MainState::kRetired; }
  /// Throws Error if the main parameters are in that state.
  void refuse_torn() const;
  void refuse_retired() const;
  /// Throws Error while a unit is summoned; `what` is refused.
  void refuse_summoned(const char* what) const;
  /// Throws Error if a parameter was given other memory than the engine's, so that updates would not reach it.
  void validate() const;
  bool is_summoned(const Unit& unit) const { return summoned_.contains(&unit); }

  /// The main parameters and the optimizer's state are read until `read` is ready. `thread`: that which ends it, if it may write, too.
  void set_reader(std::future<void> read, std::thread::id thread);
  /// What writers wait for, without the engine's lock [Writers wait for the reader]. Invalid if nobody reads. Throws Error if the calling
  /// thread reads itself.
  std::shared_future<void> reader();

  /// From now on users have views of the main parameters.
  void expose();
  bool exposed() const { return exposed_; }

  /// Call it when nobody reads. Writes back what operators have written, and waits for gathers that still read the main parameters. Throws
  /// Error if these are retired or summoned, or if validate() does.
  void flush_writes();
  /// See MainAccess::summon.
  std::vector<at::Tensor> summon(Unit& unit);
  /// See MainAccess::dismiss. True if the main parameters have changed.
  bool dismiss(Unit& unit, std::span<const at::Tensor> whole);
  /// If main parameters are replicated, all ranks get the shards that each of them has written.
  void exchange_shards();

 private:
  c10::Device device_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  Gatherer& gatherer_;
  MainState state_ = MainState::kInitial;
  std::set<std::string> torn_;
  std::unordered_set<const Unit*> summoned_;  // units whose whole main parameters the user holds (SummonFullParams)
  std::shared_future<void> reader_;           // invalid if there is no reader
  std::thread::id reader_thread_;
  bool exposed_ = false;
  pid_t reader_process_ = 0;  // that the thread belongs to: a fork copies this object, and not the thread
};

}  // namespace fsdp::engine
