#include "checkpoint/step_names.h"

#include <charconv>
#include <cstdio>
#include <random>
#include <system_error>

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kRandomDigits = 8;

}  // namespace

std::optional<StepName> step_name(std::string_view name) {
  std::size_t begin = name.size();
  while (begin > 0 && name[begin - 1] >= '0' && name[begin - 1] <= '9') --begin;
  StepName found{std::string(name.substr(0, begin))};
  const auto result = std::from_chars(name.data() + begin, name.data() + name.size(), found.number);
  if (begin == name.size() || result.ec != std::errc()) return std::nullopt;
  return found;
}

fs::path hidden_name(const fs::path& step, std::string_view prefix) {
  static thread_local std::random_device random;
  char digits[kRandomDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x", random());
  return step.parent_path() / (std::string(prefix) + step.filename().string() + "-" + digits);
}

std::string_view name_in(std::string_view hidden, std::string_view prefix) {
  if (!hidden.starts_with(prefix) || hidden.size() <= prefix.size() + kRandomDigits + 1) return {};
  hidden.remove_prefix(prefix.size());
  hidden.remove_suffix(kRandomDigits + 1);
  return hidden;
}

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace fsdp::ckpt
