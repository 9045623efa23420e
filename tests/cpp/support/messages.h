#pragma once

#include <string>

#include "fsdp/error.h"

namespace fsdp::testing {

/// The message of the exception that fn throws; "no error" if it throws none.
template <typename Exception = Error, typename Fn>
std::string message_of(const Fn& fn) {
  try {
    fn();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no error";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace fsdp::testing
