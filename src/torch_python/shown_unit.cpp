#include "torch_python/shown_unit.h"

#include <algorithm>
#include <utility>

#include "base/outside_transforms.h"
#include "hooks/hooked_model.h"
#include "torch_python/freed_with_gil.h"
#include "trigger/autograd_pass.h"

namespace py = pybind11;

namespace fsdp::torch_python {
namespace {

/// Returns the storage of a tensor; null if it has none.
const c10::StorageImpl* memory_of(const py::handle& tensor) {
  const auto* const impl = THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

ShownUnit::ShownUnit(hooks::UnitSpec spec) : HookedUnit(std::move(spec)), parameters_(this->spec().parameters.size()) {}

void ShownUnit::set_parameters(std::size_t i, py::object shard, py::object whole) {
  parameters_.at(i).shard = std::move(shard);
  parameters_[i].tensor = THPVariable_Unpack(parameters_[i].shard.ptr()).unsafeGetTensorImpl();
  parameters_[i].whole = std::move(whole);
  parameters_[i].own_memory = memory_of(parameters_[i].shard);
}

void ShownUnit::set_leaf(std::size_t i, const at::Tensor& leaf) {
  parameters_.at(i).leaf = leaf;
  HookedUnit::set_leaf(i, leaf);
}

void ShownUnit::add_place(std::size_t i, py::dict parameters, py::str name, py::object module) {
  parameters_.at(i).places.push_back({std::move(parameters), std::move(name), std::move(module)});
}

void ShownUnit::put(Shown form) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (form == Shown::kWhole) parameter.version = version_of(i);
    const auto& value = parameter.as(form);
    for (auto& place : parameter.places) {
      if (place.module.is_none()) {
        if (PyDict_SetItem(place.parameters.ptr(), place.name.ptr(), value.ptr()) != 0) throw py::error_already_set();
      } else if (const py::object module = place.module(); !module.is_none()) {
        py::setattr(module, place.name, value);
      }
    }
  }
  shown_ = form;
}

std::uint32_t ShownUnit::version_of(std::size_t i) const {
  const auto& leaf = parameters_[i].leaf;
  return leaf.defined() ? leaf.unsafeGetTensorImpl()->version_counter().current_version() : 0;
}

/// Warns, once for each model, that the program has written to unsharded parameters since modules have them. (Where the engine has bumped
/// versions, the unsharded parameters are no longer present.) Writes to main parameters are not lost.
void ShownUnit::warn_of_lost_writes() const {
  const auto& unit = this->unit();
  const auto model = this->model();
  if (shown_ != Shown::kWhole || unit.state() != engine::ParameterState::kPresent || !model) return;
  if (model->warned_of_lost_writes && !unit.sends_differences()) return;
  std::string names;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto k = unit.layout.positions()[i].sub_buffer;
    const bool is_main = unit.replicated_parameters() && unit.main_is_shared(k);
    if (unit.formats[k].extended || is_main || version_of(i) == parameters_[i].version) continue;
    names += (names.empty() ? "'" : ", '") + unit.parameters[i].name + "'";
  }
  if (names.empty()) return;
  if (unit.sends_differences()) {  // A difference would not undo them on the ranks that do not own it.
    const py::gil_scoped_release no_gil;
    model->engine()->main().exclusively([&] { model->engine()->units()[unit.place.index]->whole.is_base = false; });
  }
  if (std::exchange(model->warned_of_lost_writes, true)) return;
  const auto text =
      "writes to [" + names +
      "] are lost at the next reshard: modules had the unsharded parameters when the program wrote, and these are gathered "
      "from the shards again (FSDP2 loses them, too). Call reshard() on the module first, and write to its sharded parameters "
      "(DTensors) within torch.no_grad(), or load a state dict";
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

/// Sets requires_grad of the form to that of the shards, because the program may have changed it since the form was last shown.
void ShownUnit::train_as_shards(Shown form) {
  for (auto& parameter : parameters_) {
    parameter.trained = THPVariable_Unpack(parameter.shard.ptr()).requires_grad();
    const at::Tensor& other = THPVariable_Unpack(parameter.as(form).ptr());
    if (other.requires_grad() != parameter.trained) other.requires_grad_(parameter.trained);
  }
}

/// If the program has changed requires_grad of the form that it sees, the shards get the change, too.
void ShownUnit::take_trainability() {
  if (shown_ == Shown::kShards) return;
  for (auto& parameter : parameters_) {
    const at::Tensor& other = THPVariable_Unpack(parameter.as(shown_).ptr());
    if (other.requires_grad() == parameter.trained) continue;
    parameter.trained = other.requires_grad();
    THPVariable_Unpack(parameter.shard.ptr()).requires_grad_(parameter.trained);
  }
}

void ShownUnit::show() {
  if (shown_ == Shown::kWhole) return;
  train_as_shards(Shown::kWhole);
  put(Shown::kWhole);
}

void ShownUnit::show_post_forward() {
  if (!unit().whole.post_forward.live()) return;  // The unit stays whole.
  train_as_shards(Shown::kPostForward);
  put(Shown::kPostForward);
}

void ShownUnit::hide() {
  if (shown_ == Shown::kShards) return;
  warn_of_lost_writes();
  take_trainability();
  put(Shown::kShards);
}

void ShownUnit::entered_by_backward() {
  const py::gil_scoped_acquire gil;
  show();
}

void ShownUnit::enter(bool begins_forward) {
  const OutsideTransforms outside;
  {
    const py::gil_scoped_release no_gil;
    const auto model = require_model();
    if (begins_forward) model->begin_unit_forward(*this);
    model->enter(*this);
  }
  show();
}

bool ShownUnit::leave(const std::vector<at::Tensor>& outputs, bool hides) {
  const auto model = require_model();
  if (!outputs.empty()) model->watch(*this, outputs);
  bool ended = false;
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    ended = model->end_unit_forward(*this);
  }
  if (ended && hides) hide();
  return ended;
}

bool ShownUnit::leave_by(const py::object& output) {
  if (Py_TYPE(output.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
  if (trigger::inside_backward() || unit().communicators.post_forward) return false;
  const at::Tensor& tensor = THPVariable_Unpack(output.ptr());
  std::vector<at::Tensor> watched;
  if (at::GradMode::is_enabled() && tensor.requires_grad()) watched.push_back(tensor);
  if (!watched.empty() && tensor.is_view()) return false;
  leave(watched, unit().options.reshards_after_forward());
  return true;
}

void ShownUnit::unshard(bool wait) {
  // Registered again, so that writes are noticed from the moment when the unsharded parameters are present.
  if (unit().state() != engine::ParameterState::kPresent) hide();
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    require_model()->engine()->unshard(unit(), wait);
  }
  if (wait) show();
}

void ShownUnit::reshard() {
  hide();
  const py::gil_scoped_release no_gil;
  const OutsideTransforms outside;
  if (const auto model = this->model()) model->engine()->reshard(unit());
}

void ShownUnit::collect_gradients(std::size_t i, const at::Tensor& leaf, py::object local) {
  const auto model = require_model();
  if (local.is_none()) return model->collect_gradients(*this, i, leaf);
  model->collect_gradients(*this, i, leaf, [held = freed_with_gil<py::object>(std::move(local))](const at::Tensor& gradient) {
    const py::gil_scoped_acquire gil;
    return (*held)(gradient).cast<at::Tensor>();
  });
}

void ShownUnit::set_prefetch(bool backward, const std::vector<std::shared_ptr<ShownUnit>>& others) {
  auto& list = unit().place.prefetch[static_cast<std::size_t>(backward ? engine::Pass::kBackward : engine::Pass::kForward)];
  list.clear();
  for (const auto& other : others) list.push_back(other->unit().place.index);
}

void ShownUnit::settle() {
  if (shown_ == Shown::kWhole && unit().state() == engine::ParameterState::kPresent) return train_as_shards(shown_);
  hide();
}

/// True if a DTensor's rows still lie in the unit's storage. (Memory may be exchanged below a storage; the storage stays the same then.)
bool ShownUnit::has_its_rows(std::size_t i) const {
  const auto& parameter = parameters_[i];
  const auto& shard = this->shard(i);
  if (!shard.defined() || !parameter.wrap) return true;
  static PyObject* const local = PyUnicode_InternFromString("_local_tensor");
  const auto rows = py::reinterpret_steal<py::object>(PyObject_GetAttr(parameter.shard.ptr(), local));
  if (!rows) throw py::error_already_set();
  return memory_of(rows) == shard.storage().unsafeGetStorageImpl();
}

bool ShownUnit::has_gradients() const {
  return std::ranges::any_of(parameters_, [](const auto& one) { return THPVariable_Unpack(one.shard.ptr()).grad().defined(); });
}

bool ShownUnit::has_its_parameters() {
  warn_of_lost_writes();
  take_trainability();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const at::Tensor& shard = THPVariable_Unpack(parameter.shard.ptr());
    if (shard.unsafeGetTensorImpl() != parameter.tensor) return false;
    if (!spec().parameters[i].trainable && shard.requires_grad()) return false;
    if (memory_of(parameter.shard) != parameter.own_memory || !has_its_rows(i)) return false;
    const auto& expected = parameter.as(shown_);
    for (const auto& place : parameter.places) {
      if (PyDict_GetItem(place.parameters.ptr(), place.name.ptr()) != expected.ptr()) return false;
    }
  }
  return true;
}

std::vector<std::size_t> ShownUnit::with_assigned_data() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const bool is_wrapped = parameter.shard && parameter.wrap;
    if (is_wrapped && memory_of(parameter.shard) != parameter.own_memory && has_its_rows(i)) found.push_back(i);
  }
  return found;
}

bool ShownUnit::deliver(const std::vector<std::optional<at::Tensor>>& gradients, std::vector<py::object>& with_hooks) {
  const at::NoGradGuard no_grad;
  bool has_hooks = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i]) continue;
    auto& parameter = parameters_[i];
    const at::Tensor& shard = THPVariable_Unpack(parameter.shard.ptr());
    const auto& rows = this->shard(i);  // A unit to whose parameter this one is tied may have them in other memory.
    const bool moves = rows.defined() && rows.device() != gradients[i]->device();
    const at::Tensor arrived = moves ? gradients[i]->to(rows.device()) : *gradients[i];
    if (shard.grad().defined()) {
      const py::object gradient = parameter.shard.attr("grad");
      const py::object local = parameter.wrap ? gradient.attr("_local_tensor") : gradient;
      THPVariable_Unpack(local.ptr()).add_(arrived);
    } else {
      const py::object gradient = parameter.wrap ? parameter.wrap(arrived) : py::cast(arrived);
      shard.mutable_grad() = THPVariable_Unpack(gradient.ptr());
    }
    if (!torch::autograd::impl::hooks(shard).empty()) has_hooks = has_hooks || py::len(parameter.shard.attr("_backward_hooks")) > 0;
    if (torch::autograd::impl::post_acc_grad_hooks(shard)) with_hooks.push_back(parameter.shard);
  }
  return has_hooks;
}

}  // namespace fsdp::torch_python
