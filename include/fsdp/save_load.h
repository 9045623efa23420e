#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"

// Sharded checkpoints in the format of torch.distributed.checkpoint (DCP): Python reads what C++ wrote, and the reverse, on any number of
// ranks, with any placements, units, granularity and dtypes. Parameters and buffers are under "model", the optimizer's state under "optim"
// as get_optimizer_state_dict arranges it, what else a run needs under "extra".
namespace fsdp {

struct ExtraBytes;
struct ExtraList;
/// A value of ExtraState.
using ExtraValue = std::variant<bool, std::int64_t, double, std::string, at::Tensor, ExtraBytes, ExtraList>;
/// Python's bytes.
struct ExtraBytes {
  std::string data;  ///< Any bytes.
};
/// Python's list, and its tuple when it is read. Of all but tensors.
struct ExtraList {
  std::vector<ExtraValue> items;  ///< In their order.
};
/// What a run needs beside model and optimizer, by name: the step, where the data stood. Rank 0's is saved; every rank gets it.
using ExtraState = std::map<std::string, ExtraValue>;

/// What a save or load spends its time with, in this order. Those of the other one do not occur.
enum class Phase : std::uint8_t {
  kCollect,  ///< save: this rank's values are named, and what AsyncSaver copies at once is.
  kWrite,    ///< save: this rank's file is written and synced (by AsyncSaver: also what it copies beside training).
  kCommit,   ///< save: the ranks' parts are joined, and the checkpoint gets its name. A rank waits here for the slowest one.
  kPrune,    ///< save: older checkpoints are removed.
  kOpen,     ///< load: metadata are read, names and shapes compared, small values read.
  kCheck,    ///< load: what this rank needs is read and compared with its checksums.
  kAssign,   ///< load: it is read again, to its places. Begins when all ranks have checked.
};

/// A phase that has ended on this rank.
struct PhaseReport {
  Phase phase = Phase::kCollect;  ///< Which one.
  std::int64_t bytes = 0;         ///< Of values on this rank; written, in kWrite, of its file.
  double seconds = 0;             ///< How long it took.
};
/// Called on every rank at the end of each of its phases, on the thread that saves or loads; AsyncSaver's own after kCollect. Must not
/// throw.
using OnPhase = std::function<void(const PhaseReport& report)>;

/// What a checkpoint holds beside model and optimizer, and which older ones stay.
struct SaveOptions {
  /// After the checkpoint is complete, older complete ones of its series are removed (beside it, with the same name before the number at
  /// its end: "step-" of "step-1000"), but for the last saved, so many with this one. 0: none is. Nor where its name has no number.
  int keep_last = 0;
  /// With keep_last: those stay as well whose number is a multiple of this. 0: none for that reason.
  std::int64_t keep_every = 0;
  /// With keep_last: so many of those with the least `metric` stay as well, this one among them. 0: none for that reason.
  int keep_best = 0;
  /// What this checkpoint is worth, for keep_best: a loss, or the negative of an accuracy. Saved, rank 0's. One without it, or with NaN, is
  /// never of the best.
  std::optional<double> metric = {};
  /// The state of torch's default generator of the CPU, and of the model's device where that is another one, each rank's own.
  bool rng = true;
  /// Each rank's own: where its data loader stands. Names may differ among ranks.
  ExtraState rank_extra = {};
  /// Its state is saved, as torch.amp.GradScaler's is under "scaler".
  const GradScaler* grad_scaler = nullptr;
  /// Told of each phase.
  OnPhase on_phase = {};
};

/// Writes a checkpoint into the new folder `path` ("runs/a/1000"), on a file system that all ranks share. It appears complete or not at
/// all: files are written to a hidden folder beside it, synced, and one rename commits. A folder that is there already is replaced in the
/// same way. Collective. Throws Error on every rank if it failed on any; what was there before is then as it was.
void save(const std::string& path, torch::nn::Module& module, const ExtraState& extra = {}, SaveOptions options = {});
/// The same with the optimizer's state.
void save(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, const ExtraState& extra = {}, SaveOptions options = {});

/// Which names are read, and what else is restored.
struct LoadOptions {
  /// Error if the model has names that the checkpoint has not, or the reverse. Otherwise they stay as they are, or are left out.
  bool strict = true;
  /// The name in the checkpoint of one in the model ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"). By default the same.
  std::function<std::string(const std::string& key)> rename = {};
  /// What stands in the checkpoint where names here, after `rename`, begin with "model.". torchtitan's is "".
  std::string model_prefix = "model.";
  /// The same for "optim.". torchtitan's is "optimizer.".
  std::string optimizer_prefix = "optim.";
  /// Names of the model (as `rename` gets them) that stay as they are, and names in the checkpoint that are left out, even if strict.
  std::function<bool(const std::string& name)> ignore = {};
  /// Restores each rank's generators, if as many ranks saved them.
  bool rng = true;
  /// Gets the state that was saved. Strict: an Error if there is none.
  GradScaler* grad_scaler = nullptr;
  /// Told of each phase.
  OnPhase on_phase = {};
};

/// What load() has found beside model and optimizer.
struct Loaded {
  std::string path;                     ///< The checkpoint's.
  ExtraState extra;                     ///< As it was saved.
  ExtraState rank_extra;                ///< This rank's own, if as many ranks saved theirs. Otherwise see read_rank_extra().
  std::vector<std::string> missing;     ///< Names that the model has and the checkpoint has not. Empty if strict.
  std::vector<std::string> unexpected;  ///< The reverse, of what was asked for.
  std::optional<double> metric;         ///< SaveOptions::metric.
  bool rng = false;                     ///< The generators were restored.
  std::vector<std::string> skipped;     ///< By load_latest: what is newer and was not taken, and why.
};

/// Reads a checkpoint into a sharded model, and its optimizer: DCP's, or, for the model alone, Hugging Face's safetensors (a file, or a
/// folder with an index; its names get "model." in front). Each rank reads only the byte ranges that it needs; values are converted where
/// dtypes differ. All that is needed is read and checked, by checksums where there are any, before anything is assigned. Collective. Throws
/// Error on every rank if it failed on any; model and optimizer are then as they were, unless the error says that they are partly loaded.
///
/// The optimizer keeps its own settings (learning rates, betas); its learning-rate factor is restored.
Loaded load(const std::string& path, torch::nn::Module& module, LoadOptions options = {});
/// The same with the optimizer's state.
Loaded load(const std::string& path, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options = {});

/// The same for the newest complete checkpoint in a folder, as rank 0 sees it (see latest); nothing is done if there is none. If it turns
/// out to be damaged, the one before it is taken, and every rank is warned of it. Newer ones that Python wrote are told of. Throws Error if
/// all are damaged, and if a disk does not let it be told whether one is complete.
std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, LoadOptions options = {});
/// The same with the optimizer's state.
std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options = {});

/// Every rank's SaveOptions::rank_extra in a checkpoint, by rank: for a run on another number of ranks, which has to divide them anew. Not
/// collective. Throws Error.
std::vector<ExtraState> read_rank_extra(const std::string& path);

/// The form of the files that export_safetensors() writes.
struct ExportOptions {
  /// Of floating-point tensors; by default that of the main parameters.
  std::optional<at::ScalarType> dtype = {};
  /// A file takes tensors up to this size, or one larger one. Several files get an index.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
};

/// Writes parameters and buffers as Hugging Face's safetensors into the new folder `path`, which appears complete or not at all; what is
/// there already is an Error. Every rank writes its own ranges: none holds more than one tensor's share beside its shards. Collective.
/// Throws Error on every rank if it failed on any.
void export_safetensors(const std::string& path, torch::nn::Module& module, ExportOptions options = {});

/// The complete checkpoint of this library in a folder that was saved last, of those whose names end in a number; nothing if there is none.
/// Not collective.
std::optional<std::string> latest(const std::string& folder);

/// Saves beside training (DCP's async_save): a thread copies this rank's shards to host memory, which is kept and used again, and writes
/// them. What is saved is what there was when save() returned: whoever would write shards or the optimizer's state before they have been
/// copied waits for that, mostly the optimizer's next step; what operators or users may write at any time (buffers, replicated parameters,
/// extra state, and parameters whose shards parameter_shards() gave out) is copied by save() itself. The thread writes with a lower
/// priority (nice 10), so that training has the cores. One save is under way at most: the next one waits for it. Errors surface there, or
/// in wait().
class AsyncSaver {
 public:
  /// Makes process groups of its own. Collective. Model and optimizer (null: none) must outlive it.
  explicit AsyncSaver(torch::nn::Module& module, Optimizer* optimizer = nullptr);
  /// Waits for what is under way; its error is lost.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// As fsdp::save. Throws the Error of the save before, too; then nothing new is begun.
  void save(const std::string& path, const ExtraState& extra = {}, SaveOptions options = {});
  /// Returns when the last save is complete; throws its Error on every rank.
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
