#include "torch_python/python_value.h"

#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>

#include "fsdp/error.h"

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

using ckpt::PythonValue;

constexpr int kDeepest = 100;  // the same limit as for reading

[[noreturn]] void refuse(py::handle object, const std::string& name) {
  throw Error(
      "'" + name + "' has a value of the type " + Py_TYPE(object.ptr())->tp_name +
      ", which has no place in a checkpoint: give None, bool, int (of 64 bits), float, str, bytes, or lists, tuples and dictionaries of "
      "these. Tensors get names of their own");
}

/// A text of Python may have surrogates, as names of files that are not UTF-8 get them.
std::string text_of(py::handle object, const std::string& name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text != nullptr) return {text, static_cast<std::size_t>(size)};
  PyErr_Clear();
  throw Error("'" + name + "' has the text " + py::repr(object).cast<std::string>() +
              ", whose surrogates have no place in a checkpoint: save it as bytes, by os.fsencode() if it is the name of a file");
}

template <typename Sequence>
Sequence items_of(py::handle object, const std::string& name, int depth);

PythonValue value_of(py::handle object, const std::string& name, int depth) {
  if (depth > kDeepest) throw Error("'" + name + "' is nested more than " + std::to_string(kDeepest) + " deep");
  if (object.is_none()) return {std::monostate()};
  if (PyBool_Check(object.ptr())) return {object.cast<bool>()};
  if (PyLong_Check(object.ptr())) {
    int overflow = 0;
    const auto whole = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow != 0) refuse(object, name);
    return {static_cast<std::int64_t>(whole)};
  }
  if (PyFloat_Check(object.ptr())) return {PyFloat_AS_DOUBLE(object.ptr())};
  if (PyUnicode_Check(object.ptr())) return {text_of(object, name)};
  if (PyBytes_Check(object.ptr())) return {PythonValue::Bytes{object.cast<std::string>()}};
  if (PyTuple_Check(object.ptr())) return {items_of<PythonValue::Tuple>(object, name, depth)};
  if (PyList_Check(object.ptr())) return {items_of<PythonValue::List>(object, name, depth)};
  if (!PyDict_Check(object.ptr())) refuse(object, name);
  PythonValue::Dict dict;
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
    dict.items.push_back({value_of(key, name, depth + 1), value_of(value, name, depth + 1)});
  }
  return {std::move(dict)};
}

template <typename Sequence>
Sequence items_of(py::handle object, const std::string& name, int depth) {
  Sequence sequence;
  for (const auto& item : py::reinterpret_borrow<py::sequence>(object)) sequence.items.push_back(value_of(item, name, depth + 1));
  return sequence;
}

}  // namespace

PythonValue value_from(py::handle object, const std::string& name) { return value_of(object, name, 0); }

py::object object_of(const PythonValue& value) {
  return std::visit(
      [](const auto& typed) -> py::object {
        using T = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, PythonValue::Bytes>) {
          return py::bytes(typed.data);
        } else if constexpr (std::is_same_v<T, PythonValue::Dict>) {
          py::dict dict;
          for (const auto& [key, item] : typed.items) dict[object_of(key)] = object_of(item);
          return dict;
        } else if constexpr (std::is_same_v<T, PythonValue::List> || std::is_same_v<T, PythonValue::Tuple>) {
          py::list list;
          for (const auto& item : typed.items) list.append(object_of(item));
          if constexpr (std::is_same_v<T, PythonValue::Tuple>) return py::tuple(list);
          return list;
        } else {
          return py::cast(typed);
        }
      },
      value.value);
}

}  // namespace fsdp::torch_python
