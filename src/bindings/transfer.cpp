// Transfers of weights to ranks that divide them otherwise.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "export/planned_transfer.h"
#include "fsdp/full_weights.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

using Sizes = std::vector<std::int64_t>;
using std::chrono::milliseconds;
using weights::HeldValues;
using weights::PlannedTransfer;
using weights::Target;
using weights::TransferPeers;
using weights::TransferSettings;
using weights::TransferSide;

/// Name, offsets and sizes of a box, and the dtype in which it is sent.
using ShownBox = std::tuple<std::string, Sizes, Sizes, at::ScalarType>;
/// Sender, receiver, and what is sent.
using ShownMessage = std::tuple<int, int, std::vector<ShownBox>>;

HeldValues make_held(std::string name, Sizes shape, Sizes offsets, at::Tensor values, bool as_is) {
  return {.held = {.name = std::move(name),
                   .shape = std::move(shape),
                   .dtype = values.scalar_type(),
                   .box = {.offsets = std::move(offsets), .sizes = values.sizes().vec()},
                   .as_is = as_is},
          .values = std::move(values)};
}

std::vector<ShownMessage> messages_of(const PlannedTransfer& transfer) {
  std::vector<ShownMessage> messages;
  for (const auto& message : transfer.messages()) {
    std::vector<ShownBox> boxes;
    for (const auto& [name, offsets, sizes, dtype] : message.boxes) boxes.emplace_back(name, offsets, sizes, dtype);
    messages.emplace_back(message.sender, message.receiver, std::move(boxes));
  }
  return messages;
}

}  // namespace

void bind_transfer(py::module_& module) {
  constexpr auto kNoGil = py::call_guard<py::gil_scoped_release>();
  py::class_<TransferPeers, std::shared_ptr<TransferPeers>>(module, "TransferPeers", "The ranks of a process group.")
      .def(py::init<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::Store>, at::Device>(), py::arg("group"),
           py::arg("store"), py::arg("device"));
  py::class_<Target>(module, "TransferTarget", "What a rank wants of a tensor, and where it goes.")
      .def(py::init(&weights::target_of), py::arg("name"), py::arg("into"), py::arg("offsets"), py::arg("dtype"));
  py::class_<HeldValues>(module, "HeldChunk", "What a rank has of a tensor, with its values.")
      .def(py::init(&make_held), py::arg("name"), py::arg("shape"), py::arg("offsets"), py::arg("values"), py::arg("as_is"));
  py::class_<TransferSide>(module, "TransferSide", "What a rank brings to a transfer.")
      .def(py::init<std::vector<HeldValues>, std::vector<Target>, std::vector<std::pair<std::string, std::string>>, std::string>(),
           py::kw_only(), py::arg("held"), py::arg("targets"), py::arg("aliases"), py::arg("problem"));
  py::class_<TransferSettings>(module, "TransferSettings", "What all ranks say alike, and how long each waits.")
      .def(py::init<std::vector<int>, std::int64_t, milliseconds>(), py::arg("receivers"), py::arg("message_bytes"), py::arg("timeout"));
  py::class_<PlannedTransfer, std::shared_ptr<PlannedTransfer>>(module, "PlannedTransfer", "Who sends which boxes to whom, and how.")
      .def(py::init<std::shared_ptr<TransferPeers>, TransferSide, TransferSettings>(), py::arg("peers"), py::arg("side"),
           py::arg("settings"), kNoGil)
      .def(
          "run",
          [](PlannedTransfer& transfer, std::vector<HeldValues> held, std::string problem, milliseconds timeout,
             const std::shared_ptr<WeightSnapshot>& since) {
            transfer.run(std::move(held), std::move(problem), timeout, since == nullptr ? nullptr : &since->saved());
          },
          py::arg("held"), py::kw_only(), py::arg("problem"), py::arg("timeout"), py::arg("since"), kNoGil)
      .def_property_readonly("travelled_bytes", &PlannedTransfer::travelled_bytes)
      .def("bytes_of_pairs", [](const PlannedTransfer& transfer) { return weights::bytes_of_pairs(transfer.plan()); })
      .def("messages", &messages_of)
      .def_property_readonly("rounds", [](const PlannedTransfer& transfer) { return transfer.plan().rounds; })
      .def_property_readonly("largest_bytes", [](const PlannedTransfer& transfer) { return transfer.plan().largest_bytes; });
}

}  // namespace fsdp::bindings
