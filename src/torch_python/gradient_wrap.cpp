#include "torch_python/gradient_wrap.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

/// Returns a tensor with the metadata of the given DTensor, and a storage of its own, which is as empty as the DTensor's.
at::Tensor copy_of(const at::Tensor& wrapper) {
  const c10::impl::ExcludeDispatchKeyGuard outside_python(c10::python_ks);  // DTensor's own detach() would be called.
  auto copy = wrapper.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(/*version=*/0),
                                                                     /*allow_tensor_metadata_change=*/true);
  copy->set_python_dispatch(true);
  const auto& storage = wrapper.storage();
  copy->set_storage_keep_dtype(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                                     c10::DataPtr(nullptr, storage.device()), nullptr,
                                                                     /*resizable=*/false));
  return at::Tensor(std::move(copy));
}

void set(const py::object& target, PyObject* name, const py::object& value) {
  if (PyObject_SetAttr(target.ptr(), name, value.ptr()) != 0) throw py::error_already_set();
}

}  // namespace

py::object GradientWrap::operator()(const at::Tensor& rows) {
  static PyObject* const spec = PyUnicode_InternFromString("_spec");
  static PyObject* const local = PyUnicode_InternFromString("_local_tensor");
  if (!first_.defined()) {
    py::object made = make_(rows);
    first_ = copy_of(THPVariable_Unpack(made.ptr()));
    spec_ = made.attr(spec);
    type_ = py::type::of(made);
    return made;
  }
  auto made = py::reinterpret_steal<py::object>(THPVariable_Wrap(copy_of(first_), reinterpret_cast<PyTypeObject*>(type_.ptr())));
  set(made, spec, spec_);
  set(made, local, py::cast(rows));
  return made;
}

}  // namespace fsdp::torch_python
