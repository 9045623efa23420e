#pragma once

#include <fsdp/device_mesh.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "llama/config.h"
#include "llama/model.h"

namespace llama {

/// The model of a folder whose weights somebody may write anew: save_pretrained of Python, a folder of finetune_llama that is moved to this
/// place, a symbolic link that is changed. While new ones are loaded, there is memory for two models.
class LatestModel {
 public:
  /// Loads nothing yet.
  LatestModel(std::filesystem::path folder, const Config& config, const fsdp::DeviceMesh& mesh)
      : folder_(std::move(folder)), config_(config), mesh_(mesh) {}

  /// An ordinary model in fp32 with the weights that the folder has now. If files have changed since the last call, they are loaded. If
  /// that fails (half of a file is there, say), std::cerr tells, the weights stay, and the next call tries again. The first call throws
  /// fsdp::Error instead.
  Model& get();

 private:
  /// Size and time of each file with weights.
  using Files = std::map<std::string, std::pair<std::uintmax_t, std::filesystem::file_time_type>>;
  Files files() const;

  std::filesystem::path folder_;
  Config config_;
  fsdp::DeviceMesh mesh_;
  std::optional<Model> model_;
  Files loaded_;
};

}  // namespace llama
