#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/places.h"
#include "checkpoint/printable.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/save_load.h"
#include "state/ranks.h"
#include "state/take_newest.h"
#include "state/texts.h"

namespace fsdp {
namespace {

using state::CheckpointRanks;
using state::Fields;
using state::lines;

/// The steps that rank 0 sees in a folder. If each rank looked by itself, they might see different ones.
struct FoundSteps {
  std::vector<ckpt::Step> complete;  ///< Newest first.
  std::vector<ckpt::Step> others;
  bool folder_exists = false;
};

FoundSteps find_together(const std::string& folder, const CheckpointRanks& ranks) {
  std::string text;
  ranks.together("nothing was loaded:", [&] {
    if (ranks.index() != 0) return;
    ckpt::require_folder_of_steps(folder);
    text = std::to_string(static_cast<int>(ckpt::is_there(folder))) + '\0';
    for (const auto& step : ckpt::find_steps(folder)) {
      const auto state = std::to_string(static_cast<int>(step.state));
      for (const auto& field : {state, std::to_string(step.saved), step.name.number.digits(), step.path.string(), step.fault}) {
        text += field + '\0';
      }
    }
  });
  text = ranks.broadcast(text, "the checkpoints of a folder");
  FoundSteps found;
  Fields fields(text);
  found.folder_exists = fields.next() == "1";
  while (!fields.at_end()) {
    ckpt::Step step;
    step.state = static_cast<ckpt::Step::State>(std::stoi(fields.next()));
    step.saved = std::stoll(fields.next());
    step.name.number = ckpt::StepNumber(fields.next());
    step.path = fields.next();
    step.fault = fields.next();
    auto& kind = step.state == ckpt::Step::State::kComplete ? found.complete : found.others;
    kind.insert(kind.begin(), std::move(step));
  }
  return found;
}

/// Returns why a checkpoint is not loaded.
std::string reason(const ckpt::Step& step) {
  switch (step.state) {
    case ckpt::Step::State::kForeign:
      return "it was written by torch.distributed.checkpoint, or has lost its checksums; load() takes it by its path";
    case ckpt::Step::State::kUnnumbered:
      return "its name does not end in a number, as those of steps do; load() takes it by its path";
    default:
      return "it is damaged: " + ckpt::printable(step.fault);
  }
}

/// Notes checkpoints that are no complete steps and newer than the one that is taken (null: none).
void note_others(const FoundSteps& found, const ckpt::Step* taken, std::vector<std::string>& skipped) {
  for (const auto& step : found.others) {
    const bool is_newer = taken == nullptr || (step.saved > 0 ? step.saved > taken->saved : step.name.number > taken->name.number);
    if (!is_newer) continue;
    skipped.push_back(step.path.string() + ": " + reason(step));
  }
}

}  // namespace

namespace state {

Taken take_newest(const std::string& folder, const CheckpointRanks& ranks, const std::function<void(const std::string& path)>& load_one) {
  const auto found = find_together(folder, ranks);
  Taken taken;
  for (const auto& step : found.complete) {
    const auto path = step.path.string();
    try {
      load_one(path);
    } catch (const ckpt::DamageError& error) {
      taken.skipped.push_back(path + ": " + error.what());
      continue;
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (taken.skipped.empty()) throw;
      throw Error(error.what() + ("\n  before, these were tried:" + lines(taken.skipped)));  // one may have left the model torn
    }
    taken.path = path;
    note_others(found, &step, taken.skipped);
    if (!taken.skipped.empty()) taken.warning = "load_latest took " + path + " and not what is newer:" + lines(taken.skipped);
    return taken;
  }
  note_others(found, nullptr, taken.skipped);
  const auto is_damaged = [](const ckpt::Step& step) { return step.state == ckpt::Step::State::kDamaged; };
  if (!found.complete.empty() || std::any_of(found.others.begin(), found.others.end(), is_damaged)) {
    throw Error("no checkpoint in " + folder + " is intact; to start again, remove them or give another folder:" + lines(taken.skipped));
  }
  if (!taken.skipped.empty()) {
    taken.warning = "load_latest took none of the checkpoints in " + folder + ":" + lines(taken.skipped);
  } else if (ranks.index() == 0) {  // A first start is no fault, so one rank is enough.
    taken.warning =
        "load_latest loaded nothing: " + (found.folder_exists ? "there is no checkpoint in " + folder : "there is no folder " + folder);
  }
  return taken;
}

}  // namespace state

namespace {

std::optional<Loaded> load_newest(const std::string& folder, torch::nn::Module& module, Optimizer* optimizer, const LoadOptions& options) {
  Loaded loaded;
  const auto taken =
      state::take_newest(folder, CheckpointRanks(*handle(module).engine(), CheckpointRanks::Groups::kOfMesh), [&](const std::string& path) {
        loaded = optimizer != nullptr ? load(path, module, *optimizer, options) : load(path, module, options);
      });
  if (!taken.warning.empty()) TORCH_WARN("fsdp: ", taken.warning);
  if (!taken.path) return std::nullopt;
  loaded.skipped = taken.skipped;
  return loaded;
}

}  // namespace

std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, LoadOptions options) {
  return load_newest(folder, module, nullptr, options);
}

std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options) {
  return load_newest(folder, module, &optimizer, options);
}

std::optional<std::string> latest(const std::string& folder) {
  ckpt::require_folder_of_steps(folder);
  const auto found = ckpt::latest_step(folder);
  return found ? std::optional(found->string()) : std::nullopt;
}

}  // namespace fsdp
