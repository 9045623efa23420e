#include "torch_python/optimized.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "base/text.h"
#include "fsdp/error.h"

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

/// Names that are looked up for each parameter.
struct Names {
  PyObject* local = PyUnicode_InternFromString("_local_tensor");
  PyObject* spec = PyUnicode_InternFromString("_spec");
  PyObject* mesh = PyUnicode_InternFromString("mesh");
  PyObject* placements = PyUnicode_InternFromString("placements");
  /// The reference is never released, because Python may have ended by then.
  PyTypeObject* dtensor =
      reinterpret_cast<PyTypeObject*>(py::object(py::module_::import("torch.distributed.tensor").attr("DTensor")).release().ptr());
};

const Names& names() {
  static const Names* const names = new Names;
  return *names;
}

bool is_dtensor(PyObject* object) { return PyType_IsSubtype(Py_TYPE(object), names().dtensor) != 0; }

py::object attribute(PyObject* object, PyObject* name) {
  auto* value = PyObject_GetAttr(object, name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool equal(PyObject* a, PyObject* b, PyObject* name) {
  const auto of_a = attribute(a, name);
  const auto of_b = attribute(b, name);
  const int result = PyObject_RichCompareBool(of_a.ptr(), of_b.ptr(), Py_EQ);  // looks at identity first
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

/// True if both are DTensors of the same mesh and with equal placements, or if neither is a DTensor.
bool lie_alike(PyObject* parameter, PyObject* gradient) {
  if (is_dtensor(parameter) != is_dtensor(gradient)) return false;
  if (!is_dtensor(parameter)) return true;
  const auto a = attribute(parameter, names().spec);
  const auto b = attribute(gradient, names().spec);
  return a.is(b) || (equal(a.ptr(), b.ptr(), names().placements) && equal(a.ptr(), b.ptr(), names().mesh));
}

constexpr const char* kElsewhere = "Use an optimizer of torch.optim for it";

bool is_plain(const at::Tensor& tensor) { return !tensor.key_set().has(c10::DispatchKey::Python); }

[[noreturn]] void refuse(const std::string& optimizer, const py::dict& group, std::size_t number, std::size_t i, const std::string& what) {
  auto text = optimizer + ": parameter " + std::to_string(i) + " of group " + std::to_string(number);
  if (group.contains("param_names")) text += " ('" + py::cast<std::string>(group["param_names"][py::int_(i)]) + "')";
  throw Error(text + " " + what);
}

/// Returns the tensors of the keys; fewer if one is missing.
std::vector<at::Tensor> state_of(const py::dict& state, PyObject* parameter, const std::vector<py::str>& keys) {
  std::vector<at::Tensor> tensors;
  if (keys.empty()) return tensors;
  auto* own = PyDict_GetItemWithError(state.ptr(), parameter);
  if (own == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (own == nullptr || !PyDict_Check(own)) return tensors;
  for (const auto& key : keys) {
    auto* value = PyDict_GetItemWithError(own, key.ptr());
    if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (value == nullptr || !THPVariable_Check(value)) return tensors;
    tensors.push_back(local_of(value));
  }
  return tensors;
}

}  // namespace

at::Tensor local_of(const py::handle& tensor) {
  if (!is_dtensor(tensor.ptr())) return THPVariable_Unpack(tensor.ptr());
  return THPVariable_Unpack(attribute(tensor.ptr(), names().local).ptr());
}

OptimizedGroup optimized(const std::string& optimizer, const py::dict& group, std::size_t number, const py::dict& state,
                         const std::vector<std::string>& keys) {
  OptimizedGroup found;
  found.states.resize(keys.size());
  std::vector<py::str> key_objects;
  for (const auto& key : keys) key_objects.emplace_back(key);
  const auto parameters = py::cast<py::list>(group["params"]);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto* parameter = PyList_GET_ITEM(parameters.ptr(), static_cast<Py_ssize_t>(i));
    const at::Tensor& gradient = THPVariable_Unpack(parameter).grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided) {
      refuse(optimizer, group, number, i,
             "has a sparse gradient; make its embedding with sparse=False, or use torch.optim.SparseAdam for it");
    }
    at::Tensor local_gradient = gradient;
    if (!is_plain(gradient) || is_dtensor(parameter)) {
      const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
      local_gradient = local_of(object);
      if (!lie_alike(parameter, object.ptr()) || !is_plain(local_gradient)) {
        found.to_prepare.push_back(i);
        continue;
      }
    }
    auto value = local_of(parameter);
    if (!is_plain(value)) {
      const auto local = is_dtensor(parameter) ? attribute(parameter, names().local) : py::reinterpret_borrow<py::object>(parameter);
      refuse(
          optimizer, group, number, i,
          std::string("is a ") + Py_TYPE(local.ptr())->tp_name + "; plain tensors and DTensors of them are stepped in C++. " + kElsewhere);
    }
    if (!value.is_floating_point())
      refuse(optimizer, group, number, i, std::string("is not of a real floating-point dtype. ") + kElsewhere);
    if (local_gradient.sizes() != value.sizes()) {
      refuse(optimizer, group, number, i,
             "has the shape " + in_brackets(value.sizes()) + " on this rank, its gradient " + in_brackets(local_gradient.sizes()));
    }
    auto own_state = state_of(state, parameter, key_objects);
    if (own_state.size() < keys.size()) {
      found.to_prepare.push_back(i);
      continue;
    }
    found.indices.push_back(i);
    found.values.push_back(std::move(value));
    found.gradients.push_back(std::move(local_gradient));
    for (std::size_t k = 0; k < keys.size(); ++k) found.states[k].push_back(std::move(own_state[k]));
  }
  return found;
}

}  // namespace fsdp::torch_python
