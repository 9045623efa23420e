#pragma once

#include <string>

namespace fsdp {

/// The message of the exception that is being handled, without the C++ backtrace that c10::Error appends.
/// Call it inside a catch block only.
std::string current_exception_text();

}  // namespace fsdp
