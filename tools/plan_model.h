#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "fsdp/error.h"

namespace fsdp::tools {

/// A model by its shapes.
struct ModelShapes {
  std::shared_ptr<torch::nn::Module> module;  ///< Its parameters are on the meta device.
  std::set<std::string> blocks;               ///< Names of the modules that are units.
  std::set<std::string> embedding_and_head;   ///< Their names, if they can be units of their own.
  /// Floating-point operations of a forward over one sequence, by module and for the whole model (""). Empty if they are not known.
  std::map<std::string, double> operations;
};

/// Makes the model that `path` describes: a config.json, or the folder that has one (model_of_config()); otherwise safetensors files, their
/// index, or the folder that has them. Of these, the headers give names, shapes and dtypes; what they name "....3." is in the block that
/// ends with the first such number, and the rest is in the root. A folder with both, where there is no transformers, is planned from the
/// headers, and a line on stderr says so. `tokens`: as for model_of_config(). Throws Error if there is neither, and if a file that an index
/// names is missing.
ModelShapes model_of(const std::filesystem::path& path, std::int64_t tokens);

/// There is no Python with transformers to ask.
class NoTransformers : public Error {
 public:
  using Error::Error;
};

/// Makes the model of a config.json as the installed transformers does, with parameters of fp32, by running tools/describe_config.py in the
/// Python that the environment variable FSDP_PYTHON names ("python3" by default). With `tokens`, its operations for a sequence of so many
/// are counted; 0: they are not. Throws NoTransformers, and Error if transformers refuses the configuration, with its reason.
ModelShapes model_of_config(const std::filesystem::path& path, std::int64_t tokens);

}  // namespace fsdp::tools
