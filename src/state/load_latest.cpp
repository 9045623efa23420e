#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/commit.h"
#include "checkpoint/places.h"
#include "checkpoint/printable.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/save_load.h"
#include "state/load_plan.h"
#include "state/memory_steps.h"
#include "state/ranks.h"
#include "state/take_newest.h"
#include "state/texts.h"

namespace fsdp {
namespace {

using state::CheckpointRanks;
using state::Fields;
using state::fields_of;
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
    text = fields_of({std::to_string(static_cast<int>(ckpt::is_there(folder)))});
    for (const auto& step : ckpt::find_steps(folder)) {
      text += fields_of({std::to_string(static_cast<int>(step.state)), std::to_string(step.saved), step.name.number.digits(),
                         step.path.string(), step.fault});
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

/// The memory of hosts, which one of the folders stands for.
struct MemoryOfHosts {
  std::string folder;
  state::Hosts hosts;
  state::MemorySteps found;

  MemoryOfHosts(const std::string& path, const CheckpointRanks& ranks)
      : folder(path), hosts(state::Hosts::find(path, ranks)), found(state::MemorySteps::find(path, hosts, ranks)) {}
};

/// A step that may be loaded.
struct Candidate {
  ckpt::Step step;
  MemoryOfHosts* memory = nullptr;  // null: it is in the last folder
  state::MemoryStep* in_memory = nullptr;
};

/// All steps, the newest first. Of a step that is in memory, too, that one is first.
std::vector<Candidate> newest_first(const FoundSteps& found, std::vector<MemoryOfHosts>& memories) {
  std::vector<Candidate> candidates;
  for (auto& memory : memories) {
    for (auto& step : memory.found.steps) {
      candidates.push_back({.step = {.path = std::filesystem::path(memory.folder) / step.name,
                                     .name = ckpt::step_name(step.name).value_or(ckpt::StepName()),
                                     .saved = step.saved,
                                     .fault = {}},
                            .memory = &memory,
                            .in_memory = &step});
    }
  }
  for (const auto& step : found.complete) candidates.push_back({.step = step});
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.step.saved > b.step.saved; });
  return candidates;
}

/// Calls `load_one` for a step in memory, without the files that are damaged. Returns the origin; nothing if the step can't be loaded.
std::optional<std::string> load_from_memory(const Candidate& candidate, const CheckpointRanks& ranks, const state::LoadOne& load_one,
                                            std::vector<std::string>& skipped, bool& is_damaged) {
  const auto path = candidate.step.path.string();
  auto& [folder, hosts, found] = *candidate.memory;
  for (;;) {
    if (const auto missing = candidate.in_memory->missing(); !missing.empty()) {
      skipped.push_back(path + ": no host has " + missing + " in its memory");
      return std::nullopt;
    }
    try {
      state::HeldStep held(folder, *candidate.in_memory, hosts, ranks);
      held.open();
      load_one(path, &held);
      return held.origin();
    } catch (const ckpt::DamageError& error) {
      is_damaged = true;
      const auto faults = state::drop_damaged(*candidate.in_memory, folder, hosts, ranks);
      skipped.insert(skipped.end(), faults.begin(), faults.end());
      if (!faults.empty()) continue;
      skipped.push_back(path + ": " + error.what());
      return std::nullopt;
    }
  }
}

}  // namespace

namespace state {

Taken take_newest(const std::vector<std::string>& folders, const CheckpointRanks& ranks, const LoadOne& load_one) {
  if (folders.empty()) throw Error("load_latest: give a folder of checkpoints");
  const auto& last = folders.back();
  std::vector<MemoryOfHosts> memories;
  for (std::size_t i = 0; i + 1 < folders.size(); ++i) {
    if (ranks.all(folders[i].empty(), "checkpoint: whether there is memory")) continue;
    memories.emplace_back(folders[i], ranks);
  }
  const auto found = find_together(last, ranks);
  Taken taken;
  bool is_damaged = std::any_of(found.others.begin(), found.others.end(),
                                [](const ckpt::Step& step) { return step.state == ckpt::Step::State::kDamaged; });
  for (const auto& memory : memories) taken.skipped.insert(taken.skipped.end(), memory.found.faults.begin(), memory.found.faults.end());
  for (const auto& candidate : newest_first(found, memories)) {
    const auto path = candidate.step.path.string();
    try {
      if (candidate.memory != nullptr) {
        const auto origin = load_from_memory(candidate, ranks, load_one, taken.skipped, is_damaged);
        if (!origin) continue;
        taken.origin = *origin;
      } else {
        load_one(path, nullptr);
        taken.origin = last;
      }
    } catch (const ckpt::DamageError& error) {
      is_damaged = true;
      taken.skipped.push_back(path + ": " + error.what());
      continue;
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (taken.skipped.empty()) throw;
      throw Error(error.what() + ("\n  before, these were tried:" + lines(taken.skipped)));  // one may have left the model torn
    }
    taken.path = path;
    note_others(found, &candidate.step, taken.skipped);
    if (!taken.skipped.empty()) taken.warning = "load_latest took " + path + " and not what is newer:" + lines(taken.skipped);
    return taken;
  }
  note_others(found, nullptr, taken.skipped);
  auto given = folders;
  std::erase(given, std::string());  // no memory
  const auto everywhere = joined(given, ", ");
  if (is_damaged) {
    throw Error("no checkpoint in " + everywhere +
                " is intact; to start again, remove them or give another folder:" + lines(taken.skipped));
  }
  if (!taken.skipped.empty()) {
    taken.warning = "load_latest took none of the checkpoints in " + everywhere + ":" + lines(taken.skipped);
  } else if (ranks.index() == 0) {  // A first start is no fault, so one rank is enough.
    taken.warning =
        "load_latest loaded nothing: " + (found.folder_exists ? "there is no checkpoint in " + everywhere : "there is no folder " + last);
  }
  return taken;
}

}  // namespace state

namespace {

std::optional<Loaded> load_newest(const std::vector<std::string>& folders, torch::nn::Module& module, Optimizer* optimizer,
                                  const LoadOptions& options) {
  Loaded loaded;
  const CheckpointRanks ranks(*handle(module).engine(), CheckpointRanks::Groups::kOfMesh);
  const auto taken = state::take_newest(folders, ranks, [&](const std::string& path, state::HeldStep* held) {
    loaded = state::load_all(path, module, optimizer, options, held);
  });
  if (!taken.warning.empty()) TORCH_WARN("fsdp: ", taken.warning);
  if (!taken.path) return std::nullopt;
  loaded.skipped = taken.skipped;
  loaded.origin = taken.origin;
  return loaded;
}

}  // namespace

std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, LoadOptions options) {
  return load_newest({folder}, module, nullptr, options);
}

std::optional<Loaded> load_latest(const std::string& folder, torch::nn::Module& module, Optimizer& optimizer, LoadOptions options) {
  return load_newest({folder}, module, &optimizer, options);
}

std::optional<Loaded> load_latest(const std::string& memory, const std::string& folder, torch::nn::Module& module, LoadOptions options) {
  return load_newest({memory, folder}, module, nullptr, options);
}

std::optional<Loaded> load_latest(const std::string& memory, const std::string& folder, torch::nn::Module& module, Optimizer& optimizer,
                                  LoadOptions options) {
  return load_newest({memory, folder}, module, &optimizer, options);
}

std::optional<std::string> latest(const std::string& folder) {
  ckpt::require_folder_of_steps(folder);
  const auto found = ckpt::latest_step(folder);
  return found ? std::optional(found->string()) : std::nullopt;
}

}  // namespace fsdp
