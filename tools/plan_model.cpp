#include "plan_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/classic_stream.h"
#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "plan/config_model.h"
#include "plan_question.h"
#include "state/scalar_type.h"

namespace fsdp::tools {
namespace {

namespace fs = std::filesystem;

using Path = std::vector<std::string>;  // of modules, and the parameter at its end

bool is_number(const std::string& name) {
  return !name.empty() && std::ranges::all_of(name, [](unsigned char sign) { return std::isdigit(sign) != 0; });
}

/// Numbers by their values, and before other names: blocks are used in this order.
struct InOrder {
  static bool before(const std::string& a, const std::string& b) {
    if (is_number(a) != is_number(b)) return is_number(a);
    if (is_number(a) && a.size() != b.size()) return a.size() < b.size();
    return a < b;
  }
  bool operator()(const Path& a, const Path& b) const {
    return std::ranges::lexicographical_compare(a, b, [](const auto& one, const auto& other) { return before(one, other); });
  }
};

Path path_of(const std::string& name) {
  Path path;
  ClassicStream<std::istringstream> parts(name);
  for (std::string part; std::getline(parts, part, '.');) path.push_back(part);
  return path;
}

/// All files of a folder that has no index.
std::vector<ckpt::SafetensorsFile> files_of(const fs::path& folder) {
  if (!fs::is_directory(folder) || ckpt::is_safetensors(folder)) return ckpt::read_safetensors(folder);
  std::vector<ckpt::SafetensorsFile> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    for (auto& file : ckpt::read_safetensors(entry.path())) files.push_back(std::move(file));
  }
  if (files.empty()) throw Error(folder.string() + " has neither a config.json nor safetensors files");
  return files;
}

/// The modules of a model that is known by the names of its parameters.
class NamedModules {
 public:
  /// Adds a parameter. The module that ends with the first number of its path is a unit.
  void add(const Path& path, const at::Tensor& parameter) {
    std::shared_ptr<planning::ConfigModule> module = root_;
    std::string name;
    bool in_unit = false;
    for (std::size_t k = 0; k + 1 < path.size(); ++k) {
      name += path[k] + ".";
      auto& next = modules_[name];
      const bool is_unit = !in_unit && is_number(path[k]);
      if (!next && is_unit) next = module->register_module(path[k], std::make_shared<planning::ConfigLayer>(path[k]));
      if (!next) next = module->register_module(path[k], std::make_shared<planning::ConfigModule>(path[k]));
      in_unit = in_unit || is_unit;
      module = next;
    }
    module->register_parameter(path.back(), parameter, /*requires_grad=*/parameter.is_floating_point());
    module->is_embedding_or_head = module->is_embedding_or_head || (!in_unit && module != root_ && parameter.dim() == 2);
  }

  std::shared_ptr<torch::nn::Module> take() { return std::move(root_); }

 private:
  std::shared_ptr<planning::ConfigModule> root_ = std::make_shared<planning::ConfigModule>("model");
  std::map<std::string, std::shared_ptr<planning::ConfigModule>> modules_;  // by their names
};

std::shared_ptr<torch::nn::Module> model_of_safetensors(const fs::path& path) {
  std::map<Path, at::Tensor, InOrder> parameters;
  for (const auto& file : files_of(path)) {
    if (!file.not_there.empty()) {
      throw Error(path.string() + ": " + file.name +
                  ", which the index names, is not there; the shapes are in it. Give the model's config.json, or get the file");
    }
    for (const auto& tensor : file.tensors) {
      if (!tensor.unreadable.empty()) throw Error(path.string() + ": tensor '" + tensor.name + "': " + tensor.unreadable);
      const auto dtype = state::scalar_type_of(tensor.dtype, tensor.name);
      parameters[path_of(tensor.name)] = at::empty(tensor.shape, at::device(at::kMeta).dtype(dtype));
    }
  }
  NamedModules modules;
  for (const auto& [name, parameter] : parameters) modules.add(name, parameter);
  return modules.take();
}

}  // namespace

std::shared_ptr<torch::nn::Module> model_of(const fs::path& path) {
  constexpr std::string_view kIndex = ".safetensors.index.json";
  if (fs::is_directory(path)) {
    return fs::exists(path / "config.json") ? planning::model_of_config(read_text(path / "config.json")) : model_of_safetensors(path);
  }
  if (path.string().ends_with(kIndex)) return model_of_safetensors(path.has_parent_path() ? path.parent_path() : fs::path("."));
  if (path.extension() == ".safetensors") return model_of_safetensors(path);
  return planning::model_of_config(read_text(path));
}

}  // namespace fsdp::tools
