#include "checkpoint/step_names.h"

#include <algorithm>

#include "checkpoint/digits.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }

}  // namespace

StepNumber::StepNumber(std::string_view digits) : digits_(digits.substr(std::min(digits.find_first_not_of('0'), digits.size()))) {}

bool StepNumber::is_multiple_of(std::uint64_t divisor) const {
  std::uint64_t rest = 0;
  for (const char digit : digits_) {
    std::uint64_t next = static_cast<std::uint64_t>(digit - '0') % divisor;
    for (int i = 0; i < 10; ++i) next = (next + rest) % divisor;  // rest * 10 might overflow
    rest = next;
  }
  return rest == 0;
}

std::strong_ordering StepNumber::operator<=>(const StepNumber& other) const {
  if (digits_.size() != other.digits_.size()) return digits_.size() <=> other.digits_.size();
  return digits_.compare(other.digits_) <=> 0;
}

std::optional<StepName> step_name(std::string_view name) {
  std::size_t begin = name.size();
  while (begin > 0 && is_digit(name[begin - 1])) --begin;
  if (begin == name.size()) return std::nullopt;
  return StepName{std::string(name.substr(0, begin)), StepNumber(name.substr(begin))};
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

}  // namespace fsdp::ckpt
