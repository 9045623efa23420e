// Units and models as libfsdp's Python side drives them.

#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <map>

#include "base/outside_transforms.h"
#include "bindings/bindings.h"
#include "bindings/delivered_gradients.h"
#include "bindings/errors.h"
#include "engine/buffer.h"
#include "engine/tensor_bytes.h"
#include "fsdp/fsdp_module.h"
#include "hooks/hooked_model.h"
#include "torch_python/memory_source.h"
#include "torch_python/python_gather_extension.h"
#include "torch_python/shown_unit.h"
#include "trigger/autograd_pass.h"

namespace py = pybind11;

namespace fsdp::bindings {

using torch_python::PythonGatherExtension;
using torch_python::ShownUnit;

namespace {

using hooks::HookedModel;
using ShownUnits = std::vector<std::shared_ptr<ShownUnit>>;
constexpr auto kNoGil = py::call_guard<py::gil_scoped_release, OutsideTransforms>();

std::optional<at::ScalarType> dtype_of(const py::object& dtype) {
  if (dtype.is_none()) return std::nullopt;
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

hooks::ParameterSpec make_parameter(std::string name, std::vector<std::int64_t> shape, std::int64_t shard_dim, const py::object& dtype,
                                    bool trainable, const py::object& param_dtype, const py::object& grad_dtype, std::int64_t float8_block,
                                    bool extended) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .shard_dim = shard_dim,
          .dtype = dtype_of(dtype).value(),
          .trainable = trainable,
          .param_dtype = dtype_of(param_dtype),
          .grad_dtype = dtype_of(grad_dtype),
          .float8_block = float8_block,
          .extended = extended};
}

std::shared_ptr<ShownUnit> make_unit(std::string name, std::vector<hooks::ParameterSpec> parameters, const DeviceMesh& mesh,
                                     const std::string& placements, engine::AfterForward after_forward, std::int64_t post_forward_size,
                                     const py::object& param_dtype, const py::object& reduce_dtype, bool offload, bool pin_memory,
                                     bool outer_sharded, bool rounds_gradients) {
  hooks::UnitSpec spec;
  spec.name = std::move(name);
  spec.mesh = mesh;
  spec.options.placements = Placements::from_name(placements);
  spec.options.after_forward = after_forward;
  spec.options.offload = offload ? Offload::kAll : Offload::kNone;
  spec.options.host_memory = pin_memory ? memory::HostMemoryKind::kPinned : memory::HostMemoryKind::kPageable;
  spec.param_dtype = dtype_of(param_dtype);
  spec.reduce_dtype = dtype_of(reduce_dtype);
  spec.post_forward_size = post_forward_size;
  spec.options.outer_sharded_optimizer = outer_sharded;
  spec.rounds_gradients = rounds_gradients;
  spec.parameters = std::move(parameters);
  return std::make_shared<ShownUnit>(std::move(spec));
}

/// Returns the model that has the unit. Throws Error if none has.
std::shared_ptr<HookedModel> model_of(const ShownUnit& unit) {
  auto model = unit.hooked()->model();
  if (!model) throw Error("internal: unit '" + unit.hooked()->spec().name + "' belongs to no model");
  return model;
}

engine::UnitOptions& options_of(ShownUnit& unit) { return unit.hooked()->unit().options; }

template <typename Value>
void bind_option(py::class_<ShownUnit, std::shared_ptr<ShownUnit>>& unit, const char* name, Value engine::UnitOptions::*option) {
  unit.def_property(
      name, [option](ShownUnit& self) { return options_of(self).*option; },
      [option](ShownUnit& self, Value value) { options_of(self).*option = value; });
}

/// Holds an object that must be freed with the GIL held, on whatever thread the last reference is released.
template <typename Thing>
std::shared_ptr<Thing> freed_with_gil(Thing thing) {
  return {new Thing(std::move(thing)), [](Thing* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

ShownUnits& units_of(HookedModel& model) {
  if (!model.shown_units) model.shown_units = freed_with_gil(ShownUnits());
  return *static_cast<ShownUnits*>(model.shown_units.get());
}

/// Backward enters the unit on a thread without the GIL.
void add(HookedModel& model, const std::shared_ptr<ShownUnit>& unit, std::optional<std::size_t> parent) {
  units_of(model).push_back(unit);
  unit->hooked()->shown = [weak = std::weak_ptr(unit)] {
    const py::gil_scoped_acquire gil;
    if (const auto self = weak.lock()) self->show();
  };
  const py::gil_scoped_release no_gil;
  const OutsideTransforms outside;
  model.add(unit->hooked(), parent);
}

std::string agree(HookedModel& model, const std::vector<std::string>& settings,
                  const std::vector<std::vector<std::int64_t>>& first_values) {
  std::vector<engine::UnitText> texts;
  for (std::size_t k = 0; k < settings.size(); ++k) texts.push_back({settings[k], first_values[k]});
  return model.agree(std::move(texts));
}

/// Those whose modules have other parameters than they were given.
std::vector<std::size_t> with_other_parameters(HookedModel& model) {
  std::vector<std::size_t> found;
  const auto& units = units_of(model);
  for (std::size_t k = 0; k < units.size(); ++k) {
    if (!units[k]->has_its_parameters()) found.push_back(k);
  }
  return found;
}

void begin_forward(HookedModel& model) {
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    model.begin_forward();
  }
  for (const auto& unit : units_of(model)) unit->settle();
}

void enter(ShownUnit& unit, bool begins_forward) {
  const OutsideTransforms outside;
  {
    const py::gil_scoped_release no_gil;
    const auto model = model_of(unit);
    if (begins_forward) model->begin_unit_forward(*unit.hooked());
    model->enter(*unit.hooked());
  }
  unit.show();
}

/// A forward of the unit ends, by whose outputs backward will enter it. Its modules show shards then, if `hides`. False: an outer one goes
/// on.
bool leave(ShownUnit& unit, const std::vector<at::Tensor>& outputs, bool hides) {
  const auto model = model_of(unit);
  if (!outputs.empty()) model->watch(unit.hooked(), outputs);
  bool ended = false;
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    ended = model->end_unit_forward(*unit.hooked());
  }
  if (ended && hides) unit.hide();
  return ended;
}

/// A backward has ended: modules show shards.
void hide_after_backward(HookedModel& model) {
  for (const auto& unit : units_of(model)) {
    if (options_of(*unit).reshard_after_backward) unit->hide();
  }
}

void unshard(ShownUnit& unit, bool wait) {
  // Shown anew, so that writes are noticed from where the whole parameters are present.
  if (unit.hooked()->unit().state() != engine::ParameterState::kPresent) unit.hide();
  {
    const py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    model_of(unit)->engine().unshard(unit.hooked()->unit(), wait);
  }
  if (wait) unit.show();
}

/// Its modules show shards. If a model has the unit, the whole parameters are freed.
void reshard(ShownUnit& unit) {
  unit.hide();
  const py::gil_scoped_release no_gil;
  const OutsideTransforms outside;
  if (const auto model = unit.hooked()->model()) model->engine().reshard(unit.hooked()->unit());
}

void set_fixed_addresses(ShownUnit& unit, bool fixed) {
  if (const auto model = unit.hooked()->model()) return model->engine().set_fixed_addresses(unit.hooked()->unit(), fixed);
  options_of(unit).fixed_addresses = fixed;
}

void note_step(const ShownUnits& units) {
  const HookedModel* refused = nullptr;  // Units of one model follow one another.
  for (const auto& unit : units) {
    const auto model = unit->hooked()->model();
    if (model != nullptr && std::exchange(refused, model.get()) != model.get()) model->engine().main().refuse_export();
  }
  for (const auto& unit : units) ++unit->hooked()->steps;
}

/// `callback` returns None if the Python object that it belongs to has been collected. The parameters get their gradients nevertheless.
void on_backward_end(HookedModel& model, py::function callback) {
  model.on_backward_end([held = freed_with_gil(std::move(callback)), &model] {
    const py::gil_scoped_acquire gil;
    if (!(*held)().is_none() || !model.shown_units) return;
    for (const auto& unit : *static_cast<ShownUnits*>(model.shown_units.get())) {
      if (unit->has_all_reduce_hook) {
        throw Error("unit '" + unit->hooked()->unit().name +
                    "': its module was collected between forward and backward, and with it the hook of set_all_reduce_hook; keep the model "
                    "until backward has ended");
      }
    }
    deliver_gradients(*static_cast<ShownUnits*>(model.shown_units.get()), {});
  });
}

/// `local` is a Python function, or None; see HookedModel::collect_gradients.
void collect_gradients(ShownUnit& unit, std::size_t i, const at::Tensor& leaf, py::object local) {
  const auto model = model_of(unit);
  if (local.is_none()) return model->collect_gradients(unit.hooked(), i, leaf);
  model->collect_gradients(unit.hooked(), i, leaf, [held = freed_with_gil(std::move(local))](const at::Tensor& gradient) {
    const py::gil_scoped_acquire gil;
    return (*held)(gradient).cast<at::Tensor>();
  });
}

void set_prefetch(ShownUnit& unit, bool backward, const ShownUnits& others) {
  auto& list = unit.hooked()->unit().place.prefetch[static_cast<std::size_t>(backward ? engine::Pass::kBackward : engine::Pass::kForward)];
  list.clear();
  for (const auto& other : others) list.push_back(other->hooked()->unit().place.index);
}

/// Returns a tensor without elements. The engine increments its version whenever main parameters have been written, so that the unit's
/// extension notices that its copies are outdated. The engine treats it as the parameter's leaf, so it is on the same device as a leaf.
at::Tensor watch_writes(ShownUnit& shown, std::size_t i) {
  const c10::InferenceMode no_inference(false);  // Inference tensors have no version.
  auto& hooked = *shown.hooked();
  auto watched = engine::view_of(hooked.unit().whole.buffer.storage, at::kByte, 0, {0});
  hooked.set_leaf(i, watched);
  return watched;
}

/// Gathers pairs of tensors that a unit's extension gives, and waits for them. Call it only while the extension starts: the engine's lock
/// is held then, and the unit's own gather has not begun.
void gather_now(ShownUnit& shown, const std::vector<std::pair<at::Tensor, at::Tensor>>& given, bool outer) {
  const auto& unit = shown.hooked()->unit();
  std::vector<comm::GatherPart> parts;
  for (const auto& [whole, part] : given) parts.push_back({.full = whole, .shard = part});
  const auto& ranks = outer ? unit.communicators.outer : unit.communicators.gather;
  const py::gil_scoped_release no_gil;
  ranks->all_gather(parts, unit.label(outer ? "outer all-gather of the extension" : "all-gather of the extension"))->wait();
}

py::dict memory_stats(HookedModel& model) {
  const auto stats = model.engine().accounting().stats();
  py::dict result;
  const auto put = [&](const char* name, const MemoryUse& use) {
    result[py::str(std::string(name) + ".live")] = use.live;
    result[py::str(std::string(name) + ".peak")] = use.peak;
  };
  put("main_parameters", stats.main_parameters);
  put("main_gradients", stats.main_gradients);
  put("gathered_parameters", stats.gathered_parameters);
  put("unreduced_gradients", stats.unreduced_gradients);
  put("communication", stats.communication);
  put("total", stats.total);
  put("host", stats.host);
  put("slots", stats.slots);
  put("shared_slots", stats.shared_slots);
  result["slot_allocations"] = stats.slot_allocations;
  return result;
}

/// `further`: meshes over which weights are exported, and which count where no unit has them.
py::dict wire_stats(HookedModel& model, const std::vector<DeviceMesh>& further) {
  const auto engine = model.shared_engine();
  auto stats = FSDPModule(engine, 0).wire_stats();
  for (const auto& mesh : further) {
    for (const auto& dim : mesh.dims()) {
      const auto row = mesh.communicator(dim.name);
      const auto is_of = [&](const auto& unit) { return row == unit->communicators.gather || row == unit->communicators.outer; };
      if (std::ranges::any_of(engine->units(), is_of)) continue;
      stats.all_gather_bytes += row->stats().all_gather_bytes;
      stats.all_gathers += row->stats().all_gathers;
      stats.control_bytes += row->stats().control_bytes;
      stats.shared_memory_bytes += row->stats().shared_memory_bytes;
    }
  }
  py::dict result;
  result["all_gather_bytes"] = stats.all_gather_bytes;
  result["reduce_scatter_bytes"] = stats.reduce_scatter_bytes;
  result["control_bytes"] = stats.control_bytes;
  result["shared_memory_bytes"] = stats.shared_memory_bytes;
  result["all_gathers"] = stats.all_gathers;
  result["reduce_scatters"] = stats.reduce_scatters;
  return result;
}

}  // namespace

void bind_hooks(py::module_& module) {
  bind_errors(module);

  py::class_<hooks::ParameterSpec>(module, "ParameterSpec", "One parameter of a unit that is to be made.")
      .def(py::init(&make_parameter), py::kw_only(), py::arg("name"), py::arg("shape"), py::arg("shard_dim"), py::arg("dtype"),
           py::arg("trainable"), py::arg("param_dtype"), py::arg("grad_dtype"), py::arg("float8_block"), py::arg("extended"));

  py::enum_<engine::AfterForward>(module, "AfterForward", "What happens to a unit's unsharded parameters after forward.")
      .value("RESHARD", engine::AfterForward::kReshard)
      .value("UNTIL_BACKWARD", engine::AfterForward::kUntilBackward)
      .value("ACROSS_FORWARDS", engine::AfterForward::kAcrossForwards);

  py::class_<ShownUnit, std::shared_ptr<ShownUnit>> unit(module, "ShownUnit", "The parameters of one call of fully_shard.");
  unit.def(py::init(&make_unit), py::arg("name"), py::arg("parameters"), py::arg("mesh"), py::kw_only(), py::arg("placements"),
           py::arg("after_forward"), py::arg("post_forward_size"), py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("offload"),
           py::arg("pin_memory"), py::arg("outer_sharded"), py::arg("rounds_gradients"))
      .def("allocate", [](ShownUnit& self) { self.hooked()->allocate(); })
      .def("shard", [](ShownUnit& self, std::size_t i) { return self.hooked()->shard(i); })
      .def("tie", [](ShownUnit& self, std::size_t i,
                     const std::optional<at::Tensor>& shard) { self.hooked()->tie(i, shard.value_or(at::Tensor())); })
      .def("shard_shape", [](ShownUnit& self, std::size_t i) { return self.hooked()->shard_shape(i); })
      .def("whole", [](ShownUnit& self, std::size_t i) { return self.hooked()->whole(i); })
      .def("rename", [](ShownUnit& self, std::string name,
                        std::vector<std::string> parameters) { self.hooked()->rename(std::move(name), std::move(parameters)); })
      .def("set_leaf", [](ShownUnit& self, std::size_t i, const at::Tensor& leaf) { self.hooked()->set_leaf(i, leaf); })
      .def("set_extension",
           [](ShownUnit& self, py::function start, py::function finish, py::function free) {
             self.hooked()->set_extension(std::make_shared<PythonGatherExtension>(std::move(start), std::move(finish), std::move(free)));
           })
      .def("watch_writes", &watch_writes)
      .def("gather_now", &gather_now)
      .def("set_parameters", &ShownUnit::set_parameters)
      .def("add_place", &ShownUnit::add_place)
      .def("set_wrap", &ShownUnit::set_wrap)
      .def("post_forward_shard", [](ShownUnit& self, std::size_t i,
                                    const std::vector<std::int64_t>& shape) { return self.hooked()->post_forward_shard(i, shape); })
      .def("set_post_forward", &ShownUnit::set_post_forward)
      .def("show_post_forward", &ShownUnit::show_post_forward)
      .def("drop_post_forward_mesh", [](ShownUnit& self) { self.hooked()->drop_post_forward_mesh(); })
      .def("show", &ShownUnit::show)
      .def("hide", &ShownUnit::hide)
      .def("has_its_parameters", &ShownUnit::has_its_parameters)
      .def("with_assigned_data", &ShownUnit::with_assigned_data)
      .def("set_prefetch", &set_prefetch)
      .def("enter", &enter)
      .def("leave", &leave)
      .def(
          "leave_now", [](ShownUnit& self) { model_of(self)->engine().leave_now(self.hooked()->unit()); }, kNoGil)
      .def("watch", [](ShownUnit& self, const std::vector<at::Tensor>& outputs) { model_of(self)->watch(self.hooked(), outputs); })
      .def("watch_version", [](ShownUnit& self, const at::Tensor& tensor) { model_of(self)->watch_version(tensor); })
      .def("collect_gradients", &collect_gradients)
      .def(
          "gradient",
          [](ShownUnit& self, std::size_t i, const at::Tensor& gradient) { model_of(self)->gradient(*self.hooked(), i, gradient); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare_unshard", [](ShownUnit& self) { model_of(self)->prepare_unshard(*self.hooked()); }, kNoGil)
      .def("unshard", &unshard, py::kw_only(), py::arg("wait"))
      .def("reshard", &reshard)
      .def_property_readonly("model", [](const ShownUnit& self) { return self.hooked()->model(); })
      .def_property(
          "fixed_addresses", [](ShownUnit& self) { return options_of(self).fixed_addresses; },
          py::cpp_function(&set_fixed_addresses, kNoGil))
      .def(
          "set_mesh", [](ShownUnit& self, const DeviceMesh& mesh) { self.hooked()->set_mesh(mesh); }, kNoGil)
      .def_property(
          "separate_reduce_group", [](const ShownUnit& self) { return self.hooked()->spec().separate_reduce_group; },
          py::cpp_function([](ShownUnit& self, bool separate) { self.hooked()->set_separate_reduce_group(separate); }, kNoGil))
      .def_property(
          "gathered_in_backward", [](const ShownUnit& self) { return self.hooked()->gathered_in_backward; },
          [](ShownUnit& self, bool gathered) { self.hooked()->gathered_in_backward = gathered; })
      .def_readwrite("has_all_reduce_hook", &ShownUnit::has_all_reduce_hook)
      .def_property_readonly("allocated", [](const ShownUnit& self) { return self.hooked()->allocated(); });
  bind_option(unit, "after_forward", &engine::UnitOptions::after_forward);
  bind_option(unit, "reshard_after_backward", &engine::UnitOptions::reshard_after_backward);
  bind_option(unit, "kept_by_budget", &engine::UnitOptions::kept_by_budget);
  bind_option(unit, "updated_after_backward", &engine::UnitOptions::updated_after_backward);
  bind_option(unit, "requires_gradient_sync", &engine::UnitOptions::requires_gradient_sync);
  bind_option(unit, "requires_all_reduce", &engine::UnitOptions::requires_all_reduce);
  bind_option(unit, "gradient_divide_factor", &engine::UnitOptions::gradient_divide_factor);

  py::enum_<comm::BufferMemory>(module, "BufferMemory", "Where the buffers of collectives lie.")
      .value("PROCESS", comm::BufferMemory::kProcess)
      .value("GROUP", comm::BufferMemory::kGroup)
      .value("SYMMETRIC", comm::BufferMemory::kSymmetric);
  py::class_<HookedModel, std::shared_ptr<HookedModel>>(module, "HookedModel", "The units of a model, and the engine that moves them.")
      .def(py::init([](const DeviceMesh& mesh, int prefetch_depth, std::int64_t keep_gathered_bytes, bool report_nan) {
             auto model = std::make_shared<HookedModel>(engine::EngineOptions{.mesh = mesh,
                                                                              .tensor_parallel = {},
                                                                              .model = 0,
                                                                              .prefetch_depth = prefetch_depth,
                                                                              .keep_gathered_bytes = keep_gathered_bytes,
                                                                              .report_nan_in_param_grad = report_nan});
             model->on_error_in_backward(&throw_into_autograd);
             return model;
           }),
           py::arg("mesh"), py::kw_only(), py::arg("prefetch_depth"), py::arg("keep_gathered_bytes"), py::arg("report_nan"))
      .def("add", &add)
      .def("agree", &agree, kNoGil)
      .def(
          "tell_update",
          [](HookedModel& model, std::uint64_t by, std::string settings) { model.engine().main().tell_update(by, std::move(settings)); },
          kNoGil)
      .def("dissolve", &HookedModel::dissolve, kNoGil)
      .def("on_backward_end", &on_backward_end)
      .def("with_other_parameters", &with_other_parameters)
      .def("begin_forward", &begin_forward)
      .def("end_forward", &HookedModel::end_forward, kNoGil)
      .def("hide_after_backward", &hide_after_backward)
      .def("deliver_gradients",
           [](HookedModel& model, const std::map<std::size_t, py::object>& hooks) { return deliver_gradients(units_of(model), hooks); })
      .def(
          "reset", [](HookedModel& model) { model.engine().reset(); }, kNoGil)
      .def(
          "main_parameters_changed", [](HookedModel& model) { model.engine().main().changed(); }, kNoGil)
      .def(
          "set_is_last_backward", [](HookedModel& model, bool last) { model.engine().set({.is_last_backward = last}); }, kNoGil)
      .def(
          "set_ends_step", [](HookedModel& model, bool ends) { model.engine().set({.ends_step = ends}); }, kNoGil)
      .def(
          "set_manual_finalization", [](HookedModel& model, bool manual) { model.engine().set({.manual_finalization = manual}); }, kNoGil)
      .def(
          "finalize_backward", [](HookedModel& model, bool wait) { model.engine().finalize_backward(wait); }, kNoGil)
      .def(
          "refuse_export", [](HookedModel& model) { model.engine().main().refuse_export(); }, kNoGil)
      .def(
          "finish_gradient_sync", [](HookedModel& model) { model.engine().main().finish_gradient_sync(); }, kNoGil)
      .def("take_missed", &HookedModel::take_missed)
      .def("take_stale", &HookedModel::take_stale)
      .def(
          "zero_grad", [](HookedModel& model) { model.engine().main().zero_grad(); }, kNoGil)
      .def(
          "set_overlaps_reductions", [](HookedModel& model, bool overlaps) { model.engine().set({.overlaps_reductions = overlaps}); },
          kNoGil)
      .def(
          "set_buffer_memory", [](HookedModel& model, comm::BufferMemory memory) { model.engine().set({.buffer_memory = memory}); }, kNoGil)
      .def(
          "set_buffer_sources",
          [](HookedModel& model, py::function of_gathers, py::function of_the_rest) {
            auto gathers = torch_python::memory_source(std::move(of_gathers));
            auto rest = torch_python::memory_source(std::move(of_the_rest));
            const py::gil_scoped_release no_gil;
            model.engine().set({.buffer_sources = engine::BufferSources{.of_gathers = std::move(gathers), .of_the_rest = std::move(rest)}});
          },
          py::arg("of_gathers"), py::arg("of_the_rest"), "Each makes a tensor of so many bytes.")
      .def(
          "set_prefetch_depth", [](HookedModel& model, int depth) { model.engine().set({.prefetch_depth = depth}); }, kNoGil)
      .def("memory_stats", &memory_stats)
      .def("reset_peak_memory_stats", [](HookedModel& model) { model.engine().accounting().reset_peaks(); })
      .def(
          "has_left_gradients", [](HookedModel& model) { return model.engine().main().has_left_gradients(); }, kNoGil)
      .def("wire_stats", &wire_stats, py::arg("further"));
  module.def("note_update", &hooks::note_update, "An optimizer has updated sharded parameters.");
  module.def("note_step", &note_step, kNoGil, "An optimizer that has parameters of these units is about to step.");
  module.def("checksum", &engine::checksum, kNoGil, "Of a tensor's bytes, or of so many elements that are spread over it. Never 0.");
  module.def("inside_backward", &trigger::inside_backward, "True inside of a backward.");
}

}  // namespace fsdp::bindings
