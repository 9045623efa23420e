// Plans of transfers of weights to ranks that divide them otherwise.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "export/transfer_plan.h"

namespace py = pybind11;

namespace fsdp::bindings {
namespace {

using Sizes = std::vector<std::int64_t>;
using weights::TransferPlan;

/// Name, shape of the whole, dtype, and the offsets and sizes of the box.
using GivenHeld = std::tuple<std::string, Sizes, at::ScalarType, Sizes, Sizes>;
/// Name, offsets and sizes of the box, and the dtype in which it is sent.
using GivenSent = std::tuple<std::string, Sizes, Sizes, at::ScalarType>;
using GivenRank = std::pair<std::vector<GivenHeld>, std::vector<GivenSent>>;
/// The round, the other rank, whether it receives, the bytes, and the boxes.
using ShownMessage = std::tuple<std::int64_t, int, bool, std::int64_t, std::vector<GivenSent>>;

GivenSent shown(const TransferPlan& plan, const weights::SentBox& sent) {
  return {plan.names[sent.tensor], sent.box.offsets, sent.box.sizes, sent.dtype};
}

std::vector<GivenSent> shown(const TransferPlan& plan, const std::vector<weights::SentBox>& boxes) {
  std::vector<GivenSent> all;
  for (const auto& box : boxes) all.push_back(shown(plan, box));
  return all;
}

TransferPlan make_plan(const std::vector<GivenRank>& given, std::int64_t message_bytes) {
  const py::gil_scoped_release no_gil;
  std::vector<weights::RankBoxes> ranks;
  for (const auto& [held, wanted] : given) {
    auto& rank = ranks.emplace_back();
    for (const auto& [name, shape, dtype, offsets, sizes] : held) rank.held.push_back({name, shape, dtype, {offsets, sizes}});
    for (const auto& [name, offsets, sizes, dtype] : wanted) rank.wanted.push_back({name, {offsets, sizes}, dtype});
  }
  return weights::plan_transfer(ranks, message_bytes);
}

std::vector<ShownMessage> messages_of(const TransferPlan& plan, int rank) {
  std::vector<ShownMessage> messages;
  for (const auto& message : plan.messages) {
    if (message.sender != rank && message.receiver != rank) continue;
    const bool sends = message.sender == rank;
    messages.emplace_back(message.round, sends ? message.receiver : message.sender, sends, message.bytes, shown(plan, message.boxes));
  }
  return messages;
}

std::vector<GivenSent> own_of(const TransferPlan& plan, int rank) {
  std::vector<GivenSent> boxes;
  for (const auto& own : plan.own) {
    if (own.rank == rank) boxes.push_back(shown(plan, own.box));
  }
  return boxes;
}

/// The bytes that travel, by sender and receiver.
std::map<std::pair<int, int>, std::int64_t> bytes_of_pairs(const TransferPlan& plan) {
  std::map<std::pair<int, int>, std::int64_t> bytes;
  for (const auto& message : plan.messages) bytes[{message.sender, message.receiver}] += message.bytes;
  return bytes;
}

}  // namespace

void bind_transfer(py::module_& module) {
  py::class_<TransferPlan>(module, "TransferPlan", "Who sends which boxes to whom.")
      .def(py::init(&make_plan), py::arg("ranks"), py::kw_only(), py::arg("message_bytes"))
      .def("messages_of", &messages_of, py::arg("rank"))
      .def("own_of", &own_of, py::arg("rank"))
      .def("bytes_of_pairs", &bytes_of_pairs)
      .def_readonly("rounds", &TransferPlan::rounds)
      .def_readonly("largest_bytes", &TransferPlan::largest_bytes);
}

}  // namespace fsdp::bindings
