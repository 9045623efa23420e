#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

/// Bad input or misuse. The message names the parameter, unit and rank concerned and says what to do instead. Thrown at
/// the earliest moment and, where the fault can be seen by all, on every rank. See docs/errors.md.
class Error : public std::runtime_error {
 public:
  /// With this message.
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

/// A peer failed, left, or does something else than this rank: a collective could not complete. Carries c10d's own message,
/// extended by the operation, the unit and this rank.
class CommError : public Error {
 public:
  /// With this message.
  explicit CommError(const std::string& message) : Error(message) {}
};

}  // namespace fsdp
