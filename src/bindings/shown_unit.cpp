#include "bindings/shown_unit.h"

#include <utility>

namespace py = pybind11;

namespace fsdp::bindings {

ShownUnit::ShownUnit(hooks::UnitSpec spec) {
  const py::gil_scoped_release no_gil;  // Ranks may meet.
  hooked_ = std::make_shared<hooks::HookedUnit>(std::move(spec));
  parameters_.resize(hooked_->spec().parameters.size());
}

void ShownUnit::set_parameters(std::size_t i, py::object shard, py::object whole) {
  parameters_.at(i).shard = std::move(shard);
  parameters_[i].whole = std::move(whole);
}

void ShownUnit::add_place(std::size_t i, py::dict parameters, py::str name, py::object module) {
  parameters_.at(i).places.push_back({std::move(parameters), std::move(name), std::move(module)});
}

void ShownUnit::put(Shown form) {
  for (auto& parameter : parameters_) {
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

/// Parameters may have been frozen, or trained again, since they were shown last.
void ShownUnit::train_as_shards(Shown form) {
  for (auto& parameter : parameters_) {
    parameter.trained = THPVariable_Unpack(parameter.shard.ptr()).requires_grad();
    const at::Tensor& other = THPVariable_Unpack(parameter.as(form).ptr());
    if (other.requires_grad() != parameter.trained) other.requires_grad_(parameter.trained);
  }
}

/// What the program has frozen, or trains again, in the form that it sees counts for the shards.
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

void ShownUnit::show_kept() {
  if (!hooked_->unit().post_forward.live()) return;  // It stays whole, for one reason or another.
  train_as_shards(Shown::kKept);
  put(Shown::kKept);
}

void ShownUnit::hide() {
  if (shown_ == Shown::kShards) return;
  take_trainability();
  put(Shown::kShards);
}

void ShownUnit::settle() {
  if (shown_ == Shown::kWhole && hooked_->unit().state == engine::ParameterState::kPresent) return train_as_shards(shown_);
  hide();
}

bool ShownUnit::has_its_parameters() {
  take_trainability();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    if (!hooked_->spec().parameters[i].trainable && THPVariable_Unpack(parameter.shard.ptr()).requires_grad()) return false;
    const auto& expected = parameter.as(shown_);
    for (const auto& place : parameter.places) {
      if (PyDict_GetItem(place.parameters.ptr(), place.name.ptr()) != expected.ptr()) return false;
    }
  }
  return true;
}

void ShownUnit::deliver(const std::vector<std::optional<at::Tensor>>& gradients) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i]) continue;
    auto& parameter = parameters_[i];
    const at::Tensor& shard = THPVariable_Unpack(parameter.shard.ptr());
    if (shard.grad().defined()) {
      const py::object gradient = parameter.shard.attr("grad");
      const py::object local = parameter.wrap.is_none() ? gradient : gradient.attr("_local_tensor");
      THPVariable_Unpack(local.ptr()).add_(*gradients[i]);
    } else {
      const py::object gradient = parameter.wrap.is_none() ? py::cast(*gradients[i]) : parameter.wrap(*gradients[i]);
      shard.mutable_grad() = THPVariable_Unpack(gradient.ptr());
    }
    if (!torch::autograd::impl::post_acc_grad_hooks(shard)) continue;
    const py::list hooks(parameter.shard.attr("_post_accumulate_grad_hooks").attr("values")());
    for (const auto hook : hooks) hook(parameter.shard);
  }
}

}  // namespace fsdp::bindings
