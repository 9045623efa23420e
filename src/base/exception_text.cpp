#include "base/exception_text.h"

#include <c10/util/Exception.h>

#include <exception>

namespace fsdp {

std::string current_exception_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace fsdp
