#include "checkpoint/places.h"

#include <algorithm>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/printable.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

/// "step-590, step-600": the newest few.
std::string names_of_newest(const std::vector<Step>& steps) {
  constexpr std::size_t kShown = 5;
  std::string names = steps.size() > kShown ? "..., " : "";
  for (std::size_t i = steps.size() - std::min(kShown, steps.size()); i < steps.size(); ++i) {
    names += printable_line(steps[i].path.filename().string()) + (i + 1 < steps.size() ? ", " : "");
  }
  return names;
}

}  // namespace

void require_checkpoint(const fs::path& path) {
  if (path.empty()) throw Error("the path of a checkpoint is empty");
  if (!fs::exists(path)) throw Error("there is no checkpoint " + path.string());
  if (is_there(path / kMetadataFile) || is_there(path / kSidecar) || is_safetensors(path)) return;
  const auto steps = find_steps(path);
  if (!steps.empty()) {
    throw Error(path.string() + " is no checkpoint: it is a folder of checkpoints, and holds " + names_of_newest(steps) +
                "; name one of them");
  }
  const auto names = list_folder(path);
  const auto has_data = [](const std::string& name) { return name.ends_with(".distcp"); };
  if (std::any_of(names.begin(), names.end(), has_data)) return;  // the remains of a checkpoint
  throw Error(path.string() + " is no checkpoint: it has neither metadata of torch.distributed.checkpoint nor safetensors");
}

void require_folder_of_steps(const fs::path& folder) {
  if (folder.empty()) throw Error("the path of a folder of checkpoints is empty");
  if (!is_there(folder / kMetadataFile) || !find_steps(folder).empty()) return;
  throw Error(folder.string() +
              " is no folder of checkpoints: it is a checkpoint itself; load() takes it, and load_latest() the folder around it");
}

}  // namespace fsdp::ckpt
