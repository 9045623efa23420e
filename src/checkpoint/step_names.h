#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::ckpt {

/// "step-1000" is number 1000 of the series "step-".
struct StepName {
  std::string stem;
  std::uint64_t number = 0;
};
/// Splits a name. Nothing if it does not end in a number, or if the number is greater than 2^64 - 1.
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
/// Removes a slash at the end: "ckpt/" becomes "ckpt".
std::filesystem::path without_slash(const std::filesystem::path& path);

}  // namespace fsdp::ckpt
