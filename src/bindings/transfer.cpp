// Transfers of weights to ranks that divide them otherwise.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
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
using weights::Meetings;
using weights::PlannedTransfer;
using weights::Target;

/// Name, shape of the whole, offsets of the box, and its values.
using GivenHeld = std::tuple<std::string, Sizes, Sizes, at::Tensor, bool>;
/// Name, offsets and sizes of the box, and the dtype in which it is sent.
using ShownSent = std::tuple<std::string, Sizes, Sizes, at::ScalarType>;
/// Sender, receiver, and what is sent.
using ShownMessage = std::tuple<int, int, std::vector<ShownSent>>;

/// Calls Python. Its exceptions become std::runtime_error with their text alone.
template <typename Call>
auto with_gil(const Call& call) {
  const py::gil_scoped_acquire gil;
  try {
    return call();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(py::str(error.value()).cast<std::string>());
  }
}

/// The ranks of a process group of torch.distributed, whose functions Python calls.
class PythonPeers final : public weights::TransferPeers {
 public:
  PythonPeers(std::shared_ptr<Meetings> meetings, c10::Device device, py::object group)
      : TransferPeers(std::move(meetings)), device_(device), group_(std::move(group)) {}
  ~PythonPeers() override {
    const py::gil_scoped_acquire gil;
    group_ = py::object();
  }
  PythonPeers(const PythonPeers&) = delete;
  PythonPeers& operator=(const PythonPeers&) = delete;

  c10::Device device() const override { return device_; }

  std::vector<std::string> exchange(const std::string& bytes) const override {
    return with_gil([&] { return group_.attr("exchange")(py::bytes(bytes)).cast<std::vector<std::string>>(); });
  }

  std::vector<Wait> post(const std::vector<weights::PostedMessage>& messages) const override {
    return with_gil([&] {
      py::list given;
      for (const auto& message : messages) given.append(py::make_tuple(message.sends, message.peer, message.bytes));
      std::vector<Wait> waits;
      for (const auto& work : group_.attr("post")(given)) {
        const std::shared_ptr<py::object> held(new py::object(py::reinterpret_borrow<py::object>(work)), [](py::object* object) {
          const py::gil_scoped_acquire gil;
          delete object;
        });
        waits.emplace_back([held](milliseconds timeout) { with_gil([&] { held->attr("wait")(timeout); }); });
      }
      return waits;
    });
  }

 private:
  const c10::Device device_;
  py::object group_;
};

std::vector<HeldValues> held_of(const std::vector<GivenHeld>& given) {
  std::vector<HeldValues> all;
  for (const auto& [name, shape, offsets, values, as_is] : given) {
    const ckpt::Box box = {offsets, values.sizes().vec()};
    all.push_back({.held = {.name = name, .shape = shape, .dtype = values.scalar_type(), .box = box, .as_is = as_is}, .values = values});
  }
  return all;
}

std::shared_ptr<PlannedTransfer> make_transfer(std::shared_ptr<Meetings> meetings, const at::Device& device, py::object group,
                                               const std::vector<GivenHeld>& held, std::vector<Target> targets,
                                               std::vector<std::pair<std::string, std::string>> aliases,
                                               std::tuple<std::vector<int>, std::int64_t, milliseconds> settings, std::string problem) {
  auto peers = std::make_shared<PythonPeers>(std::move(meetings), device, std::move(group));
  weights::TransferSide side{
      .held = held_of(held), .targets = std::move(targets), .aliases = std::move(aliases), .problem = std::move(problem)};
  auto& [receivers, message_bytes, timeout] = settings;
  const py::gil_scoped_release no_gil;
  return std::make_shared<PlannedTransfer>(
      std::move(peers), std::move(side),
      weights::TransferSettings{.receivers = std::move(receivers), .message_bytes = message_bytes, .timeout = timeout});
}

std::vector<ShownMessage> messages_of(const PlannedTransfer& transfer) {
  const auto& plan = transfer.plan();
  const auto rank = transfer.peers().rank();
  std::vector<ShownMessage> messages;
  for (const auto& message : plan.messages) {
    if (message.sender != rank && message.receiver != rank) continue;
    std::vector<ShownSent> boxes;
    for (const auto& box : message.boxes) boxes.emplace_back(plan.names[box.tensor], box.box.offsets, box.box.sizes, box.dtype);
    messages.emplace_back(message.sender, message.receiver, std::move(boxes));
  }
  return messages;
}

Target make_target(const std::string& name, const at::Tensor& into, std::optional<Sizes> offsets, const py::object& dtype) {
  std::optional<at::ScalarType> travels;
  if (!dtype.is_none()) travels = dtype.cast<at::ScalarType>();
  return weights::target_of(name, into, std::move(offsets), travels);
}

}  // namespace

void bind_transfer(py::module_& module) {
  py::class_<Meetings, std::shared_ptr<Meetings>>(module, "Meetings", "Where the ranks of a group wait for each other.")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int>(), py::arg("store"), py::arg("rank"), py::arg("size"));
  py::class_<Target>(module, "TransferTarget", "What a rank wants of a tensor, and where it goes.")
      .def(py::init(&make_target), py::arg("name"), py::arg("into"), py::arg("offsets"), py::arg("dtype"));
  py::class_<PlannedTransfer, std::shared_ptr<PlannedTransfer>>(module, "PlannedTransfer", "Who sends which boxes to whom, and how.")
      .def(py::init(&make_transfer), py::arg("meetings"), py::arg("device"), py::arg("group"), py::kw_only(), py::arg("held"),
           py::arg("targets"), py::arg("aliases"), py::arg("settings"), py::arg("problem"))
      .def(
          "run",
          [](PlannedTransfer& transfer, const std::vector<GivenHeld>& held, std::string problem, milliseconds timeout,
             const std::shared_ptr<WeightSnapshot>& since) {
            auto values = held_of(held);
            const py::gil_scoped_release no_gil;
            transfer.run(std::move(values), std::move(problem), timeout, since == nullptr ? nullptr : &since->saved());
          },
          py::arg("held"), py::kw_only(), py::arg("problem"), py::arg("timeout"), py::arg("since"))
      .def_property_readonly("travelled_bytes", &PlannedTransfer::travelled_bytes)
      .def("bytes_of_pairs", [](const PlannedTransfer& transfer) { return weights::bytes_of_pairs(transfer.plan()); })
      .def("messages", &messages_of)
      .def_property_readonly("rounds", [](const PlannedTransfer& transfer) { return transfer.plan().rounds; })
      .def_property_readonly("largest_bytes", [](const PlannedTransfer& transfer) { return transfer.plan().largest_bytes; });
}

}  // namespace fsdp::bindings
