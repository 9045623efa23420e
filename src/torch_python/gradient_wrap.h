#pragma once

#include <torch/extension.h>

#include <utility>

namespace fsdp::torch_python {

/// Makes the gradient of a DTensor from this rank's rows. Members need the GIL.
///
/// A Python function makes the first gradient. Later ones are copies of it over other rows, because calling the function for each parameter
/// and step would take most of the time in which gradients are delivered.
class GradientWrap {
 public:
  /// `make` returns a DTensor over the rows that it is given. It must not refer to the unit, because the garbage collector does not see
  /// this reference. With None, gradients are the rows themselves.
  explicit GradientWrap(pybind11::object make = pybind11::none()) : make_(std::move(make)) {}
  /// False if gradients are the rows themselves.
  explicit operator bool() const { return !make_.is_none(); }
  /// Returns a new gradient. All calls have rows of one shape, dtype and device.
  pybind11::object operator()(const at::Tensor& rows);

 private:
  pybind11::object make_;
  at::Tensor first_;  ///< A copy of the DTensor that `make_` has returned, without a Python object, so that it keeps no rows alive.
  pybind11::object spec_, type_;  ///< Its spec and its class.
};

}  // namespace fsdp::torch_python
