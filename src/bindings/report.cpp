#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "base/classic_stream.h"
#include "bindings/bindings.h"
#include "fsdp/step_report.h"
#include "torch_python/shown_model.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

std::map<std::string, double> by_name(const std::array<double, kWaitReasons>& reasons) {
  std::map<std::string, double> named;
  for (std::size_t i = 0; i < kWaitReasons; ++i) named[to_string(static_cast<WaitReason>(i))] = reasons[i];
  return named;
}

py::object measured(double ms) { return ms < 0 ? py::object(py::none()) : py::object(py::float_(ms)); }

/// The values of libfsdp.StepReport's fields, and of its text.
py::dict report(torch_python::ShownModel& model, std::int64_t steps) {
  StepReport report;
  {
    const py::gil_scoped_release no_gil;
    report = step_report(FSDPModule(model.engine(), 0), steps);
  }
  ClassicStream<std::ostringstream> table;
  table << report;
  py::list waits;
  for (const auto& exposed : report.waits) {
    py::dict entry;
    entry["unit"] = exposed.unit;
    entry["operation"] = exposed.operation;
    entry["in_backward"] = exposed.in_backward;
    entry["ms"] = exposed.ms;
    entry["device_ms"] = measured(exposed.device_ms);
    entry["reasons"] = by_name(exposed.reasons);
    entry["late_rank"] = exposed.late_rank < 0 ? py::object(py::none()) : py::object(py::int_(exposed.late_rank));
    entry["late_rank_was"] = exposed.late_rank_was;
    waits.append(entry);
  }
  py::list slowest;
  for (const auto& [rank, compute_ms] : report.slowest_ranks) slowest.append(py::make_tuple(rank, compute_ms));
  py::dict fields;
  fields["steps"] = report.steps;
  fields["step_ms"] = report.times.step_ms;
  fields["slowest_step_ms"] = report.times.slowest_step_ms;
  fields["forward_ms"] = report.times.forward_ms;
  fields["backward_ms"] = report.times.backward_ms;
  fields["between_ms"] = report.times.between_ms;
  fields["compute_ms"] = report.times.compute_ms;
  fields["exposed_ms"] = report.times.exposed_ms;
  fields["device_exposed_ms"] = measured(report.times.device_exposed_ms);
  fields["reasons"] = by_name(report.reasons);
  fields["overlap"] = report.overlap;
  fields["waits"] = waits;
  fields["slowest_ranks"] = slowest;
  fields["median_compute_ms"] = report.median_compute_ms;
  fields["sent_bytes"] = report.sent_bytes;
  fields["shared_memory_bytes"] = report.shared_memory_bytes;
  fields["peak_bytes"] = report.peak_bytes;
  fields["peak_unit"] = report.peak_unit;
  fields["line"] = to_line(report);
  fields["table"] = table.str();
  return fields;
}

}  // namespace

void bind_report(py::module_& module) { module.def("step_report", &report, py::arg("model"), py::arg("steps")); }

}  // namespace fsdp::bindings
