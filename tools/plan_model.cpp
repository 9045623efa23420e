#include "plan_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cctype>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/classic_stream.h"
#include "checkpoint/printable.h"
#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "named_modules.h"
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

ModelShapes model_of_safetensors(const fs::path& path) {
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
  ModelShapes model;
  model.module = modules.root();
  for (const auto& [names, parameter] : parameters) {
    modules.add(names, parameter, /*trained=*/parameter.is_floating_point());
    std::string name;
    bool in_block = false;
    for (std::size_t k = 0; k + 1 < names.size() && !in_block; ++k) {
      name += (k == 0 ? "" : ".") + names[k];
      in_block = is_number(names[k]);
    }
    if (in_block) {
      model.blocks.insert(name);
    } else if (!name.empty() && parameter.dim() == 2) {
      model.embedding_and_head.insert(name);
    }
  }
  return model;
}

bool has_safetensors(const fs::path& folder) {
  return std::ranges::any_of(fs::directory_iterator(folder), [](const auto& entry) { return entry.path().extension() == ".safetensors"; });
}

}  // namespace

std::vector<std::string> path_of(const std::string& name) {
  Path path;
  ClassicStream<std::istringstream> parts(name);
  for (std::string part; std::getline(parts, part, '.');) path.push_back(part);
  return path;
}

void NamedModules::add(const Path& path, const at::Tensor& parameter, bool trained) {
  auto module = root_;
  std::string name;
  for (std::size_t k = 0; k + 1 < path.size(); ++k) {
    name += path[k] + ".";
    auto& next = modules_[name];
    if (!next) next = module->register_module(path[k], std::make_shared<torch::nn::Module>(path[k]));
    module = next;
  }
  module->register_parameter(path.back(), parameter, trained);
}

ModelShapes model_of(const fs::path& path, std::int64_t tokens) {
  constexpr std::string_view kIndex = ".safetensors.index.json";
  if (fs::is_directory(path)) {
    if (!fs::exists(path / "config.json")) return model_of_safetensors(path);
    try {
      return model_of_config(path / "config.json", tokens);
    } catch (const NoTransformers& error) {
      if (!has_safetensors(path)) throw;
      std::cerr << "fsdp plan: planned from the safetensors headers, because " << ckpt::printable(error.what()) << "\n";
      return model_of_safetensors(path);
    }
  }
  if (path.string().ends_with(kIndex)) return model_of_safetensors(path.has_parent_path() ? path.parent_path() : fs::path("."));
  if (path.extension() == ".safetensors") return model_of_safetensors(path);
  return model_of_config(path, tokens);
}

}  // namespace fsdp::tools
