#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace fsdp::torch_python {

/// Makes an object that is destroyed with the GIL held, on whatever thread the last reference is released.
template <typename Thing, typename... Arguments>
std::shared_ptr<Thing> freed_with_gil(Arguments&&... arguments) {
  return {new Thing(std::forward<Arguments>(arguments)...), [](Thing* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace fsdp::torch_python
