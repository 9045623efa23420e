#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <memory>

namespace fsdp::tools {

/// Makes the model that `path` describes, by its shapes: a config.json, or the folder that has one (planning::model_of_config); otherwise
/// safetensors files, their index, or the folder that has them. Of these, the headers give names, shapes and dtypes; what they name
/// "....3." is in the unit that ends with the first such number, and the rest is in the root. Throws Error if there is neither, and if a
/// file that an index names is missing.
std::shared_ptr<torch::nn::Module> model_of(const std::filesystem::path& path);

}  // namespace fsdp::tools
