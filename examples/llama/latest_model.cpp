#include "llama/latest_model.h"

#include <iostream>
#include <system_error>

#include "llama/folder.h"

namespace llama {

LatestModel::Files LatestModel::files() const {
  Files found;
  std::error_code ignored;  // Who loads the files tells what is wrong with them.
  for (const auto& entry : std::filesystem::directory_iterator(folder_, ignored)) {
    const auto name = entry.path().filename().string();
    if (!name.ends_with(".safetensors") && !name.ends_with(".index.json")) continue;
    found[name] = {entry.file_size(ignored), entry.last_write_time(ignored)};
  }
  return found;
}

Model& LatestModel::get() {
  for (auto now = files(); !model_ || now != loaded_; now = files()) {
    try {
      model_ = load_whole(folder_, config_, mesh_);
      loaded_ = std::move(now);  // The loop looks whether they have changed meanwhile.
    } catch (const std::exception& error) {
      if (!model_) throw;
      std::cerr << "the weights stay as they were: " << error.what() << std::endl;
      break;
    }
  }
  return *model_;
}

}  // namespace llama
