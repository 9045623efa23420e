#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"

// Sharded checkpoints in the format of torch.distributed.checkpoint (DCP). Python reads checkpoints of C++, and the reverse, on any number
// of ranks, with any placements, units, granularity and dtypes. Parameters and buffers are under "model", and the optimizer's state is
// under "optim" as get_optimizer_state_dict arranges it. The program's own values are under "extra".
namespace fsdp {

struct ExtraBytes;
struct ExtraList;
struct ExtraDict;
/// Python's None.
using ExtraNone = std::monostate;
/// A value of ExtraState.
using ExtraValue = std::variant<bool, std::int64_t, double, std::string, at::Tensor, ExtraBytes, ExtraList, ExtraDict, ExtraNone>;
/// Python's bytes.
struct ExtraBytes {
  std::string data;  ///< Any bytes.
};
/// Python's list. Python's tuples are read as lists, too.
struct ExtraList {
  std::vector<ExtraValue> items;  ///< In their order.
};
/// Python's dict. Keys that are whole numbers are read as strings, too, as DCP has them.
struct ExtraDict {
  std::map<std::string, ExtraValue> items;  ///< By key.
};
/// Values of the program by name, such as the step or the position in the data. Rank 0's values are saved, and every rank loads them.
using ExtraState = std::map<std::string, ExtraValue>;

namespace detail {
const ExtraValue& extra_named(const ExtraState& extra, const std::string& name);
[[noreturn]] void refuse_extra(const std::string& name, std::size_t found, std::size_t wanted);
}  // namespace detail

/// Returns the value of this name: `get_extra<std::int64_t>(loaded->rank_extra, "position")`. "scheduler.last_epoch" is a value of the
/// dictionary "scheduler", unless it is a name itself. An integer can be read as a double. Throws Error, with the existing names, if the
/// name does not exist, and if the value is of another type.
template <typename T>
T get_extra(const ExtraState& extra, const std::string& name) {
  static_assert(std::is_constructible_v<ExtraValue, std::in_place_type_t<T>>,
                "T is one of ExtraValue's types; whole numbers are std::int64_t, others double");
  const auto& value = detail::extra_named(extra, name);
  if (const auto* typed = std::get_if<T>(&value)) return *typed;
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  }
  detail::refuse_extra(name, value.index(), ExtraValue(std::in_place_type<T>).index());
}

/// The phases of a save or a load, in their order.
enum class Phase : std::uint8_t {
  kCollect,  ///< save: this rank's values get their names. AsyncSaver copies the values that may change at any time.
  kWrite,    ///< save: this rank's file is written and synced. AsyncSaver also copies the other values.
  kCommit,   ///< save: the ranks' parts are joined, and the checkpoint gets its name. A rank waits here for the slowest one.
  kPrune,    ///< save: older checkpoints are removed.
  kOpen,     ///< load: metadata are read, names and shapes compared, small values read.
  kCheck,    ///< load: this rank's data are read and compared with their checksums. 0 bytes if the data are read only once.
  kAssign,   ///< load: the data are read into the model, and compared with their checksums. Begins when all ranks have checked.
};

/// A phase that has ended on this rank.
struct PhaseReport {
  Phase phase = Phase::kCollect;  ///< The phase.
  std::int64_t bytes = 0;         ///< The bytes of this rank's values; in kWrite, the bytes that were written to its file.
  double seconds = 0;             ///< How long it took.
};
/// Called on every rank at the end of each of its phases, on the thread that saves or loads. After kCollect, that is AsyncSaver's own
/// thread. Must not throw.
using OnPhase = std::function<void(const PhaseReport& report)>;

/// Additional contents of a checkpoint, and which older checkpoints are kept.
struct SaveOptions {
  /// How many checkpoints of a series are kept. A series is all checkpoints in one folder with the same name before the number at the end
  /// ("step-" of "step-1000"). After this checkpoint is complete, older complete ones are removed, except for the last keep_last saved,
  /// this one included. Nothing is removed if this is 0, or if the name has no number.
  int keep_last = 0;
  /// With keep_last: checkpoints whose number is a multiple of this are kept as well. 0 turns this off.
  std::int64_t keep_every = 0;
  /// With keep_last: this many of the checkpoints with the least `metric` are kept as well. 0 turns this off.
  int keep_best = 0;
  /// The value that keep_best compares: a loss, or the negative of an accuracy. Rank 0's is saved. A checkpoint without it, or with NaN, is
  /// never among the best.
  std::optional<double> metric = {};
  /// Whether to save each rank's random generators: torch's default generator of the CPU, and that of the model's device if it is another.
  bool rng = true;
  /// Each rank's own values, such as the position of its data loader. Names may differ among ranks.
  ExtraState rank_extra = {};
  /// A scaler whose state is saved under "scaler", like torch.amp.GradScaler's.
  const GradScaler* grad_scaler = nullptr;
  /// Called at the end of each phase.
  OnPhase on_phase = {};
};

/// Writes a checkpoint into the new folder `path` ("runs/a/1000"), on a file system that all ranks share. The checkpoint is complete or
/// absent: files are written to a hidden folder beside it and synced, and one rename commits them. An older checkpoint of that name is
/// replaced in the same way. Collective. Throws Error on every rank if it failed on any. Earlier checkpoints are then unchanged.
void save(const std::string& path, torch::nn::Module& module, const ExtraState& extra = {}, SaveOptions options = {});
/// save() with the optimizer's state.
void save(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, const ExtraState& extra = {}, SaveOptions options = {});

/// Options of load().
struct LoadOptions {
  /// True throws Error if a name of the model is missing in the checkpoint, or the reverse. False leaves such values of the model
  /// unchanged, and ignores such names of the checkpoint.
  bool strict = true;
  /// Takes a name of the model ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg") and returns its name in the checkpoint. By
  /// default this is the same. It is called for names that begin with "model." or "optim." only.
  std::function<std::string(const std::string& key)> rename = {};
  /// Replaces the beginning "model." of names, after `rename`. For torchtitan's checkpoints it is "".
  std::string model_prefix = "model.";
  /// Replaces the beginning "optim." in the same way. For torchtitan's checkpoints it is "optimizer.".
  std::string optimizer_prefix = "optim.";
  /// Returns true for names that the load ignores, also with `strict`: names of the model or the optimizer (as `rename` gets them), whose
  /// values then stay as they are, and names in the checkpoint, which are then neither read nor unexpected.
  std::function<bool(const std::string& name)> ignore = {};
  /// True checks all data before any are assigned, so that model and optimizer keep their values if a checkpoint is damaged. False, on all
  /// ranks and with `strict`, checks each block while it is assigned. That takes half of the time. If it fails, the model is partly loaded,
  /// and using it is an Error until another load succeeds. A model that has only its initial values is always loaded in this way.
  bool check_first = true;
  /// True loads the saved settings of the optimizer's parameters: learning rates, weight decay, betas, eps, momentum and the like, as
  /// torch's load_state_dict does. It is an Error if parameters of one group were saved with different settings, or if a saved setting can
  /// only be set when an optimizer is constructed. By default the optimizer keeps its own settings.
  bool optimizer_settings = false;
  /// Whether to restore each rank's random generators. This needs the number of ranks that saved them.
  bool rng = true;
  /// A scaler whose state is loaded. With `strict`, it is an Error if the checkpoint has none.
  GradScaler* grad_scaler = nullptr;
  /// Called at the end of each phase.
  OnPhase on_phase = {};
};

/// The result of load(): additional contents of the checkpoint.
struct Loaded {
  /// get_extra() of `extra`: `loaded->get<std::int64_t>("step")`.
  template <typename T>
  T get(const std::string& name) const {
    return get_extra<T>(extra, name);
  }

  std::string path;                     ///< The path of the checkpoint.
  ExtraState extra;                     ///< The values that were saved.
  ExtraState rank_extra;                ///< This rank's own values, if the number of ranks is the same. Otherwise see read_rank_extra().
  std::vector<std::string> missing;     ///< Names that the model has and the checkpoint has not. Empty if strict.
  std::vector<std::string> unexpected;  ///< Names that only the checkpoint has (of the optimizer only if one was passed).
  std::optional<double> metric;         ///< SaveOptions::metric.
  bool rng = false;                     ///< Whether the generators were restored.
  std::vector<std::string> skipped;     ///< Newer checkpoints that load_latest did not load, with the reasons.
  /// Where load_latest found the checkpoint: "memory of this host", with the number of bytes that other hosts have sent from theirs, or the
  /// last folder.
  std::string origin;
};

/// Reads a checkpoint into a sharded model and its optimizer. The checkpoint has DCP's format, or, for the model alone, is Hugging Face's
/// safetensors (a file, or a folder with an index; "model." is added in front of its names). Each rank reads only the byte ranges that it
/// needs. Values are converted if dtypes differ. All data are compared with checksums, if there are any. Collective. Throws Error on all
/// ranks if it failed on any. Model and optimizer are then unchanged, unless the error says that they are partly loaded. Using a model or
/// an optimizer that is partly loaded is an Error until a load has replaced the same values.
///
/// Data are read twice: all of them are checked before any are assigned. They are read only once with LoadOptions::check_first = false, and
/// for a model whose parameters no optimizer, user or load has written since fully_shard. (The engine does not notice writes to replicated
/// parameters, so it reads twice for models with these.) If such a load fails, model and optimizer may be partly loaded, and the values of
/// buffers, and the values that parameters had before fully_shard, may be lost. To keep these values if a load fails, call
/// FSDPModule::main_parameters_changed() before it: then all data are checked first.
///
/// The optimizer keeps its own settings (learning rates, betas) unless LoadOptions::optimizer_settings is true; its learning-rate factors
/// are restored.
Loaded load(const std::string& path, torch::nn::Module& module, LoadOptions options = {});
/// load() with the optimizer's state.
Loaded load(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options = {});

/// Loads the newest complete checkpoint in a folder, as rank 0 sees it (see latest). If there is none, returns nothing, and rank 0 prints a
/// warning. If the newest one is damaged, loads the one before it, and every rank prints a warning. The warning also names newer
/// checkpoints that are ignored, because torch.distributed.checkpoint wrote them, or because their names do not end in a number. Throws
/// Error if all are damaged, or if a disk error prevents the check whether one is complete.
std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, LoadOptions options = {});
/// load_latest() with the optimizer's state.
std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options = {});
/// Loads the newest checkpoint in the memory of the ranks' hosts (AsyncSaverOptions::memory; empty: none) or in a folder that all ranks
/// share. `memory` may be another path on each host. A step in memory is complete if each of its files is in the memory of some host. If it
/// is as new as one in the folder, it is preferred. A rank reads files from the memory of its own host, and gets the parts that it needs of
/// other files from the hosts that have them. A damaged file counts as absent: its copy on another host is read, and if there is none, the
/// checkpoint before. Everything else is as without `memory`.
std::optional<Loaded> load_latest(const std::string& memory, const std::string& folder, torch::nn::Module& module,
                                  LoadOptions options = {});
/// load_latest() with the optimizer's state.
std::optional<Loaded> load_latest(const std::string& memory, const std::string& folder, torch::nn::Module& module, Optimizer& optimizer,
                                  LoadOptions options = {});

/// Returns every rank's SaveOptions::rank_extra in a checkpoint, by rank. A run on another number of ranks uses it to divide these values
/// again. Not collective. Throws Error.
std::vector<ExtraState> read_rank_extra(const std::string& path);

/// Options of export_safetensors().
struct ExportOptions {
  /// The dtype of floating-point tensors; by default that of the main parameters.
  std::optional<at::ScalarType> dtype = {};
  /// The largest size of a file, unless a single tensor is larger. Several files get an index.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
};

/// Writes parameters and buffers as Hugging Face's safetensors into the new folder `path`, which is complete or absent. It is an Error if
/// `path` exists. Every rank writes its own ranges, and holds at most one tensor's share in addition to its shards. Collective. Throws
/// Error on every rank if it failed on any.
void export_safetensors(const std::string& path, torch::nn::Module& module, ExportOptions options = {});

/// The path of the newest complete checkpoint of this library in a folder: the one that was saved last, of those whose names end in a
/// number of any length. Nothing if there is none. Not collective.
std::optional<std::string> latest(const std::string& folder);
/// The path of the checkpoint with the least SaveOptions::metric among those that latest() chooses from. If several have the same metric,
/// it is the newest of them. Nothing if none has a metric. Not collective.
std::optional<std::string> best(const std::string& folder);

/// Options of AsyncSaver.
struct AsyncSaverOptions {
  /// A folder in tmpfs, such as "/dev/shm/my-run", for checkpoints that survive the ranks, but not their host. Its name stands for the run,
  /// which finds it again when it is restarted; no other run on this host may use it. Ranks that see the same folder are on one host. Each
  /// host holds the files of its ranks and the copies for other hosts, of two steps at most: the last complete one, and the one that is
  /// being written or came after it. Empty: no checkpoints in memory.
  std::string memory = {};
  /// Each rank's file is also sent to the host that is this many hosts after its own. One host has no copies.
  int distance = 1;
};

/// Saves in the background (DCP's async_save). A thread copies this rank's shards to host memory, which is kept for the next save, and then
/// writes them. The checkpoint has the values at the time when save() returns. A call that writes shards or the optimizer's state (usually
/// the optimizer's next step) waits for the copy. Data that operators or users may write at any time are copied by save() itself: buffers,
/// replicated parameters, extra state, and all parameters after a call of parameter_shards(). A relative path is resolved when save() is
/// called; the permissions of files follow the umask at the time of writing. The thread writes with a lower priority (nice 10), so that
/// training gets the cores. Only one save runs at a time, and the next one waits for it. The next save() or wait() throws an error of the
/// last one.
class AsyncSaver {
 public:
  /// Makes process groups of its own. Collective. Model and optimizer (null: none) must outlive it. Throws Error on every rank if the
  /// folder for steps in memory can't be used.
  explicit AsyncSaver(torch::nn::Module& module, Optimizer* optimizer = nullptr, AsyncSaverOptions options = {});
  /// Waits for saves that are running. Their errors are lost. Steps in memory stay.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Like fsdp::save. With AsyncSaverOptions::memory, also saves in memory, under the last part of the path. Throws the Error of the save
  /// before, too; then no new save begins.
  void save(const std::string& path, const ExtraState& extra = {}, SaveOptions options = {});
  /// Saves in memory only, under a name such as "step-7". Waits for the save in memory before, but not for one to the disk. Throws the
  /// Error of the save in memory before, too; then no new save begins. The options of save() for older checkpoints have no effect.
  void save_in_memory(const std::string& name, const ExtraState& extra = {}, SaveOptions options = {});
  /// Returns when the last saves are complete; throws their Error on every rank.
  void wait();
  /// Waits for the last save in memory only, and throws its Error on every rank. A restart then repeats the steps since that save at most.
  void wait_for_memory();
  /// Waits, and removes all steps from memory: call it when the run has ended and will not be restarted. Collective. Throws Error.
  void remove_memory();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
