// Models of config.json, which transformers makes.

#include <ATen/ATen.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/program_output.h"
#include "describe_config.h"
#include "named_modules.h"
#include "plan_model.h"
#include "plan_question.h"

namespace fsdp::tools {
namespace {

std::string python() {
  const char* given = std::getenv("FSDP_PYTHON");
  return given != nullptr && *given != '\0' ? given : "python3";
}

nlohmann::json description_of(const std::filesystem::path& path, std::int64_t tokens) {
  std::vector<std::string> command = {python(), "-c", kDescribeConfig, path.string()};
  if (tokens > 0) command.push_back(std::to_string(tokens));
  auto found = nlohmann::json::parse(output_of(command), nullptr, /*allow_exceptions=*/false);
  const bool has_run = found.is_object();
  if (!has_run || !found.value("has_transformers", true)) {
    throw NoTransformers("transformers makes the model of a config.json, and '" + python() +
                         (has_run ? "' can't import it (" + found.value("error", "") + ")" : "' does not run") +
                         ". Install it there (pip install transformers), set FSDP_PYTHON to a Python that has it, or give the model's "
                         "safetensors files");
  }
  if (found.contains("error")) {
    throw Error(path.string() + ": transformers refuses it: " + found.value("error", "") +
                "\nSafetensors files, or libfsdp.plan() of a model in Python, need no config.json");
  }
  return found;
}

}  // namespace

ModelShapes model_of_config(const std::filesystem::path& path, std::int64_t tokens) {
  read_text(path);  // An error of our own if it can't be read.
  const auto description = description_of(path, tokens);
  NamedModules modules;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : description.at("parameters")) {
    auto& tensor = tensors[parameter.at("same_as").get<std::string>()];
    if (!tensor.defined()) {
      tensor = at::empty(parameter.at("shape").get<std::vector<std::int64_t>>(), at::device(at::kMeta).dtype(at::kFloat));
    }
    modules.add(path_of(parameter.at("name").get<std::string>()), tensor, parameter.at("trained").get<bool>());
  }
  return {.module = modules.root(),
          .blocks = description.at("blocks").get<std::set<std::string>>(),
          .embedding_and_head = description.at("embedding_and_head").get<std::set<std::string>>(),
          .operations = description.value("operations", std::map<std::string, double>())};
}

}  // namespace fsdp::tools
