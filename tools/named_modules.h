#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::tools {

/// The parts of a parameter's name: its modules, and the parameter at the end.
std::vector<std::string> path_of(const std::string& name);

/// Modules that are made from the names of their parameters.
class NamedModules {
 public:
  /// Adds a parameter, and the modules of its path that are not there yet. The same tensor may have several paths.
  void add(const std::vector<std::string>& path, const at::Tensor& parameter, bool trained);
  std::shared_ptr<torch::nn::Module> root() const { return root_; }

 private:
  std::shared_ptr<torch::nn::Module> root_ = std::make_shared<torch::nn::Module>("model");
  std::map<std::string, std::shared_ptr<torch::nn::Module>> modules_;  ///< By name.
};

}  // namespace fsdp::tools
