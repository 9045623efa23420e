#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

/// Bad input or misuse. The message names the parameter, unit and rank concerned and the way out. It is thrown as early as possible, and on
/// every rank if all ranks can detect the fault. See docs/run/errors.md.
class Error : public std::runtime_error {
 public:
  /// With this message.
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

/// A collective could not complete, because another rank failed, exited, or called another collective. The message is c10d's, extended by
/// the operation, the unit and this rank.
class CommError : public Error {
 public:
  /// With this message.
  explicit CommError(const std::string& message) : Error(message) {}
};

}  // namespace fsdp
