#include "checkpoint/step_names.h"

#include "checkpoint/digits.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

}  // namespace

std::optional<StepName> step_name(std::string_view name) {
  std::size_t begin = name.size();
  while (begin > 0 && name[begin - 1] >= '0' && name[begin - 1] <= '9') --begin;
  const auto number = number_in<std::uint64_t>(name.substr(begin));
  if (!number) return std::nullopt;
  return StepName{std::string(name.substr(0, begin)), *number};
}

fs::path hidden_name(const fs::path& step, std::string_view prefix) {
  return step.parent_path() / (std::string(prefix) + step.filename().string() + "-" + random_digits());
}

std::string_view name_in(std::string_view hidden, std::string_view prefix) {
  if (!hidden.starts_with(prefix) || hidden.size() <= prefix.size() + kHexDigits + 1) return {};
  hidden.remove_prefix(prefix.size());
  hidden.remove_suffix(kHexDigits + 1);
  return hidden;
}

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace fsdp::ckpt
