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
/// Nothing for a name without a number at its end, or with one above 2^64 - 1.
std::optional<StepName> step_name(std::string_view name);

/// Hidden names are a prefix, the step's name, and random digits: of steps that are being written or removed, and of those that wait to be
/// replaced.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";
inline constexpr std::string_view kReplacedPrefix = ".old-";

/// A hidden name beside `step` that nobody has.
std::filesystem::path hidden_name(const std::filesystem::path& step, std::string_view prefix);
/// The step's name in a hidden one; empty for other names.
std::string_view name_in(std::string_view hidden, std::string_view prefix);

/// The folder that `path` is in; "." for a name alone.
std::filesystem::path parent_of(const std::filesystem::path& path);
/// "ckpt/" is "ckpt".
std::filesystem::path without_slash(const std::filesystem::path& path);

}  // namespace fsdp::ckpt
