#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::ckpt {

/// The number of a step. It has any number of digits, because names that are made of date and time exceed every integer type.
class StepNumber {
 public:
  StepNumber() = default;
  explicit StepNumber(std::string_view digits);

  bool is_multiple_of(std::uint64_t divisor) const;
  /// The digits without zeros before them; empty for 0.
  const std::string& digits() const { return digits_; }

  bool operator==(const StepNumber&) const = default;
  std::strong_ordering operator<=>(const StepNumber& other) const;

 private:
  std::string digits_;
};

/// "step-1000" is number 1000 of the series "step-".
struct StepName {
  std::string stem;
  StepNumber number;
};
/// Splits a name. Nothing if it does not end in a number.
std::optional<StepName> step_name(std::string_view name);

/// A hidden name consists of a prefix, the step's name, and random digits. Steps that are being written or removed have one, and so do
/// steps that wait to be replaced.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";
inline constexpr std::string_view kReplacedPrefix = ".old-";

/// Returns an unused hidden name beside `step`.
std::filesystem::path hidden_name(const std::filesystem::path& step, std::string_view prefix);
/// Returns the step's name that a hidden name contains; empty for other names.
std::string_view name_in(std::string_view hidden, std::string_view prefix);

/// Returns the folder that contains `path`; "." for a name alone.
std::filesystem::path parent_of(const std::filesystem::path& path);

}  // namespace fsdp::ckpt
