#pragma once

#include <c10/util/Exception.h>

#include <exception>

namespace fsdp {

/// Runs `clean_up` where an error is about to be reported. What it throws becomes a warning, so that it does not replace the first error.
template <typename CleanUp>
void after_error(const CleanUp& clean_up) {
  try {
    clean_up();
  } catch (const std::exception& error) {
    TORCH_WARN("fsdp: after the error that is reported, this failed, too: ", error.what());
  }
}

}  // namespace fsdp
