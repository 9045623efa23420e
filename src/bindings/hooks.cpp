// Units and models as libfsdp's Python side drives them.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <algorithm>
#include <map>

#include "base/outside_transforms.h"
#include "base/rounded_blocks.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "engine/engine.h"
#include "engine/tensor_bytes.h"
#include "fsdp/fsdp_module.h"
#include "torch_python/freed_with_gil.h"
#include "torch_python/memory_source.h"
#include "torch_python/python_gather_extension.h"
#include "torch_python/shown_model.h"
#include "trigger/autograd_pass.h"

namespace py = pybind11;

namespace fsdp::bindings {

using engine::Engine;
using engine::MainParameters;
using torch_python::PythonGatherExtension;
using torch_python::ShownModel;
using torch_python::ShownUnit;

namespace {

constexpr auto kNoGil = py::call_guard<py::gil_scoped_release, OutsideTransforms>();

using Dtype = std::optional<at::ScalarType>;

hooks::ParameterSpec make_parameter(std::string name, std::vector<std::int64_t> shape, std::int64_t shard_dim, at::ScalarType dtype,
                                    bool trainable, Dtype param_dtype, Dtype grad_dtype, const std::optional<GatherFormat>& gather_format,
                                    bool extended) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .shard_dim = shard_dim,
          .dtype = dtype,
          .trainable = trainable,
          .param_dtype = param_dtype,
          .grad_dtype = grad_dtype,
          .gather_format = gather_format ? std::make_shared<const GatherFormat>(*gather_format) : nullptr,
          .extended = extended};
}

std::shared_ptr<ShownUnit> make_unit(std::string name, std::vector<hooks::ParameterSpec> parameters, const DeviceMesh& mesh,
                                     const std::string& placements, engine::AfterForward after_forward, std::int64_t post_forward_size,
                                     Dtype param_dtype, Dtype reduce_dtype, bool offload, bool pin_memory, bool outer_sharded,
                                     bool rounds_gradients, std::optional<GradCommFormat> grad_comm_format) {
  hooks::UnitSpec spec;
  spec.name = std::move(name);
  spec.mesh = mesh;
  spec.options.placements = Placements::from_name(placements);
  spec.options.after_forward = after_forward;
  spec.options.offload = offload ? Offload::kAll : Offload::kNone;
  spec.options.host_memory = pin_memory ? memory::HostMemoryKind::kPinned : memory::HostMemoryKind::kPageable;
  spec.param_dtype = param_dtype;
  spec.reduce_dtype = reduce_dtype;
  spec.post_forward_size = post_forward_size;
  spec.options.outer_sharded_optimizer = outer_sharded;
  spec.rounds_gradients = rounds_gradients;
  spec.options.grad_comm_format = grad_comm_format;
  spec.parameters = std::move(parameters);
  const py::gil_scoped_release no_gil;
  return torch_python::freed_with_gil<ShownUnit>(std::move(spec));
}

template <typename Value>
void bind_option(py::class_<ShownUnit, std::shared_ptr<ShownUnit>>& unit, const char* name, Value engine::UnitOptions::*option) {
  unit.def_property(
      name, [option](ShownUnit& self) { return self.unit().options.*option; },
      [option](ShownUnit& self, Value value) { self.unit().options.*option = value; });
}

/// A method of the model's engine.
template <typename... Arguments>
auto of_engine(void (Engine::*method)(Arguments...)) {
  return [method](ShownModel& model, Arguments... arguments) { (*model.engine().*method)(std::move(arguments)...); };
}

/// A method of the model's main parameters.
template <typename Result, typename... Arguments>
auto of_main(Result (MainParameters::*method)(Arguments...)) {
  return [method](ShownModel& model, Arguments... arguments) { return (model.engine()->main().*method)(std::move(arguments)...); };
}

std::string agree(ShownModel& model, const std::vector<std::string>& settings, const std::vector<std::vector<std::int64_t>>& first_values) {
  std::vector<engine::UnitText> texts;
  for (std::size_t k = 0; k < settings.size(); ++k) texts.push_back({settings[k], first_values[k]});
  return model.agree(std::move(texts));
}

py::dict memory_stats(ShownModel& model) {
  const auto stats = model.engine()->accounting().stats();
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
py::dict wire_stats(ShownModel& model, const std::vector<DeviceMesh>& further) {
  const auto& engine = model.engine();
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

  py::class_<GatherFormat>(module, "GatherFormat", "The bytes in which a parameter is gathered.");
  module.def("float8_blocks", &float8_blocks, py::arg("block"));
  module.def(
      "int4_differences", [](std::int64_t block, bool hadamard) { return int4_differences({.block = block, .hadamard = hadamard}); },
      py::arg("block"), py::arg("hadamard"));

  py::class_<hooks::ParameterSpec>(module, "ParameterSpec", "One parameter of a unit that is to be made.")
      .def(py::init(&make_parameter), py::kw_only(), py::arg("name"), py::arg("shape"), py::arg("shard_dim"), py::arg("dtype"),
           py::arg("trainable"), py::arg("param_dtype"), py::arg("grad_dtype"), py::arg("gather_format"), py::arg("extended"));

  py::class_<GradCommFormat>(module, "GradCommFormat", "See libfsdp.GradCommFormat.")
      .def(py::init([](int bits, std::int64_t block, bool hadamard, bool stochastic_rounding, std::uint64_t seed, bool error_feedback) {
             const GradCommFormat format{bits, block, hadamard, stochastic_rounding, seed, error_feedback};
             try {
               check_format(format);
             } catch (const Error& error) {
               throw py::value_error(error.what());
             }
             return format;
           }),
           py::kw_only(), py::arg("bits"), py::arg("block"), py::arg("hadamard"), py::arg("stochastic_rounding"), py::arg("seed"),
           py::arg("error_feedback"));

  py::enum_<engine::AfterForward>(module, "AfterForward", "What happens to a unit's unsharded parameters after forward.")
      .value("RESHARD", engine::AfterForward::kReshard)
      .value("UNTIL_BACKWARD", engine::AfterForward::kUntilBackward)
      .value("ACROSS_FORWARDS", engine::AfterForward::kAcrossForwards);

  py::class_<ShownUnit, std::shared_ptr<ShownUnit>> unit(module, "ShownUnit", "The parameters of one call of fully_shard.");
  unit.def(py::init(&make_unit), py::arg("name"), py::arg("parameters"), py::arg("mesh"), py::kw_only(), py::arg("placements"),
           py::arg("after_forward"), py::arg("post_forward_size"), py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("offload"),
           py::arg("pin_memory"), py::arg("outer_sharded"), py::arg("rounds_gradients"), py::arg("grad_comm_format"))
      .def("allocate", &ShownUnit::allocate)
      .def_property_readonly("allocated", &ShownUnit::allocated)
      .def("shard", &ShownUnit::shard)
      .def("tie", [](ShownUnit& self, std::size_t i, const std::optional<at::Tensor>& shard) { self.tie(i, shard.value_or(at::Tensor())); })
      .def("shard_shape", &ShownUnit::shard_shape)
      .def("whole", &ShownUnit::whole)
      .def("rename", &ShownUnit::rename)
      .def("set_leaf", &ShownUnit::set_leaf)
      .def("set_extension",
           [](ShownUnit& self, py::function start, py::function finish, py::function free) {
             self.set_extension(std::make_shared<PythonGatherExtension>(std::move(start), std::move(finish), std::move(free)));
           })
      .def("watch_writes", &ShownUnit::watch_writes)
      .def("gather_now", &ShownUnit::gather_now, py::call_guard<py::gil_scoped_release>())
      .def("set_parameters", &ShownUnit::set_parameters)
      .def("add_place", &ShownUnit::add_place)
      .def("set_wrap", &ShownUnit::set_wrap)
      .def("post_forward_shard", &ShownUnit::post_forward_shard)
      .def("set_post_forward", &ShownUnit::set_post_forward)
      .def("show_post_forward", &ShownUnit::show_post_forward)
      .def("drop_post_forward_mesh", &ShownUnit::drop_post_forward_mesh)
      .def("show", &ShownUnit::show)
      .def("hide", &ShownUnit::hide)
      .def("has_its_parameters", &ShownUnit::has_its_parameters)
      .def("with_assigned_data", &ShownUnit::with_assigned_data)
      .def("set_prefetch", &ShownUnit::set_prefetch)
      .def("enter", &ShownUnit::enter)
      .def("leave", &ShownUnit::leave)
      .def("leave_by", &ShownUnit::leave_by)
      .def(
          "leave_now", [](ShownUnit& self) { self.require_model()->engine()->leave_now(self.unit()); }, kNoGil)
      .def("watch", [](ShownUnit& self, const std::vector<at::Tensor>& outputs) { self.require_model()->watch(self, outputs); })
      .def("watch_version", [](ShownUnit& self, const at::Tensor& tensor) { self.require_model()->watch_version(tensor); })
      .def("collect_gradients", &ShownUnit::collect_gradients)
      .def(
          "gradient", [](ShownUnit& self, std::size_t i, const at::Tensor& gradient) { self.require_model()->gradient(self, i, gradient); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare_unshard", [](ShownUnit& self) { self.require_model()->prepare_unshard(self); }, kNoGil)
      .def("unshard", &ShownUnit::unshard, py::kw_only(), py::arg("wait"))
      .def("reshard", &ShownUnit::reshard)
      .def_property_readonly("model", [](const ShownUnit& self) { return std::static_pointer_cast<ShownModel>(self.model()); })
      .def_property(
          "fixed_addresses", [](ShownUnit& self) { return self.unit().options.fixed_addresses; },
          py::cpp_function([](ShownUnit& self, bool fixed) { self.set_fixed_addresses(fixed); }, kNoGil))
      .def("set_mesh", &ShownUnit::set_mesh, kNoGil)
      .def_property(
          "separate_reduce_group", [](const ShownUnit& self) { return self.spec().separate_reduce_group; },
          py::cpp_function([](ShownUnit& self, bool separate) { self.set_separate_reduce_group(separate); }, kNoGil))
      .def_readwrite("gathered_in_backward", &ShownUnit::gathered_in_backward)
      .def_readwrite("has_all_reduce_hook", &ShownUnit::has_all_reduce_hook);
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
  py::class_<ShownModel, std::shared_ptr<ShownModel>>(module, "HookedModel", "The units of a model, and the engine that moves them.")
      .def(py::init([](const DeviceMesh& mesh, int prefetch_depth, std::int64_t keep_gathered_bytes, bool report_nan) {
             auto model = std::make_shared<ShownModel>(engine::EngineOptions{.mesh = mesh,
                                                                             .tensor_parallel = {},
                                                                             .model = 0,
                                                                             .prefetch_depth = prefetch_depth,
                                                                             .keep_gathered_bytes = keep_gathered_bytes,
                                                                             .report_nan_in_param_grad = report_nan});
             model->on_error_in_backward(&throw_into_autograd);
             return model;
           }),
           py::arg("mesh"), py::kw_only(), py::arg("prefetch_depth"), py::arg("keep_gathered_bytes"), py::arg("report_nan"))
      .def(
          "add",
          [](ShownModel& model, const std::shared_ptr<ShownUnit>& unit, std::optional<std::size_t> parent) { model.add(unit, parent); },
          kNoGil)
      .def("agree", &agree, kNoGil)
      .def("tell_update", of_main(&MainParameters::tell_update), kNoGil)
      .def("dissolve", &ShownModel::dissolve, kNoGil)
      .def("on_backward_end", &ShownModel::on_backward_end)
      .def("with_other_parameters", &ShownModel::with_other_parameters)
      .def("begin_forward", &ShownModel::begin_forward)
      .def(
          "attend",
          [](ShownModel& model, const std::vector<std::shared_ptr<ShownUnit>>& attended, bool present, bool divide_by_present) {
            std::vector<engine::Unit*> units;
            for (const auto& one : attended) units.push_back(&one->unit());
            model.engine()->attend(units, {.present = present, .divide_by_present = divide_by_present});
          },
          kNoGil, py::arg("units"), py::kw_only(), py::arg("present"), py::arg("divide_by_present"))
      .def("take_writes", &ShownModel::take_writes, kNoGil)
      .def("end_forward", of_engine(&Engine::end_forward), kNoGil)
      .def("hide_after_backward", &ShownModel::hide_after_backward)
      .def("deliver_gradients", &ShownModel::deliver_gradients)
      .def("reset", of_engine(&Engine::reset), kNoGil)
      .def("main_parameters_changed", &ShownModel::parameters_changed, kNoGil)
      .def(
          "set",
          [](ShownModel& model, std::optional<int> prefetch_depth, std::optional<bool> is_last_backward, std::optional<bool> ends_step,
             std::optional<bool> manual_finalization, std::optional<bool> overlaps_reductions) {
            model.engine()->set({.prefetch_depth = prefetch_depth,
                                 .is_last_backward = is_last_backward,
                                 .ends_step = ends_step,
                                 .manual_finalization = manual_finalization,
                                 .overlaps_reductions = overlaps_reductions});
          },
          kNoGil, py::kw_only(), py::arg("prefetch_depth") = py::none(), py::arg("is_last_backward") = py::none(),
          py::arg("ends_step") = py::none(), py::arg("manual_finalization") = py::none(), py::arg("overlaps_reductions") = py::none(),
          "Sets what is given, and leaves the rest as it is.")
      .def(
          "set_buffer_memory", [](ShownModel& model, comm::BufferMemory memory) { model.engine()->set({.buffer_memory = memory}); }, kNoGil)
      .def(
          "set_buffer_sources",
          [](ShownModel& model, py::function of_gathers, py::function of_the_rest) {
            auto gathers = torch_python::memory_source(std::move(of_gathers));
            auto rest = torch_python::memory_source(std::move(of_the_rest));
            const py::gil_scoped_release no_gil;
            model.engine()->set(
                {.buffer_sources = engine::BufferSources{.of_gathers = std::move(gathers), .of_the_rest = std::move(rest)}});
          },
          py::arg("of_gathers"), py::arg("of_the_rest"), "Each makes a tensor of so many bytes.")
      .def("finalize_backward", of_engine(&Engine::finalize_backward), kNoGil)
      .def("refuse_export", of_main(&MainParameters::refuse_export), kNoGil)
      .def("finish_gradient_sync", of_main(&MainParameters::finish_gradient_sync), kNoGil)
      .def("has_left_gradients", of_main(&MainParameters::has_left_gradients), kNoGil)
      .def("zero_grad", of_main(&MainParameters::zero_grad), kNoGil)
      .def("take_missed", &ShownModel::take_missed)
      .def("take_stale", &ShownModel::take_stale)
      .def("memory_stats", &memory_stats)
      .def("reset_peak_memory_stats", [](ShownModel& model) { model.engine()->accounting().reset_peaks(); })
      .def("wire_stats", &wire_stats, py::arg("further"));
  module.def("note_update", &torch_python::note_update, kNoGil,
             "An optimizer has updated sharded parameters, among them those of these units.");
  module.def("note_step", &torch_python::note_step, kNoGil, "An optimizer that has parameters of these units is about to step.");
  module.def("checksum", &engine::checksum, kNoGil, "Of a tensor's bytes, or of so many elements that are spread over it. Never 0.");
  module.def("inside_backward", &trigger::inside_backward, "True inside of a backward.");
}

}  // namespace fsdp::bindings
