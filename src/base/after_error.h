#pragma once

#include <c10/util/Exception.h>

#include <exception>

namespace fsdp {

/// Runs `clean_up` when an error is about to be reported. An exception in it becomes a warning, so that it does not replace the first
/// error.
template <typename CleanUp>
void after_error(const CleanUp& clean_up) {
  try {
    clean_up();
  } catch (const std::exception& error) {
    TORCH_WARN("fsdp: after the error that is reported, this failed, too: ", error.what());
  }
}

}  // namespace fsdp
