#include "export/transfer_side.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

std::string dtype_name(at::ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

}  // namespace

std::string problem_of(const TransferSide& side, const TransferSettings& settings, int rank, int ranks) {
  if (!side.problem.empty()) return side.problem;
  if (settings.message_bytes < 16) return "message_bytes must be at least 16, got " + std::to_string(settings.message_bytes);
  if (std::ranges::any_of(settings.receivers, [&](int one) { return one < 0 || one >= ranks; })) {
    return "receivers must be ranks of the group, below " + std::to_string(ranks) + ", got " + in_brackets(settings.receivers);
  }
  if (!side.targets.empty() && std::ranges::count(settings.receivers, rank) == 0) {
    return "it wants " + std::to_string(side.targets.size()) + " boxes, but is none of the receivers " + in_brackets(settings.receivers);
  }
  return {};
}

Target target_of(const std::string& name, const at::Tensor& into, std::optional<std::vector<std::int64_t>> offsets,
                 std::optional<at::ScalarType> dtype) {
  if (!into.defined() || into.is_meta()) {
    throw Error("'" + name + "' is to go into a tensor without memory; it takes a tensor with memory of its own, or a view of one");
  }
  if (into.layout() != at::kStrided || into.is_neg() || into.is_conj() || at::has_internal_overlap(into) == at::MemOverlap::Yes) {
    throw Error("'" + name +
                "' is to go into a tensor that can't be written in place (sparse, expanded, or a lazy negative or conjugate); give an "
                "ordinary tensor of the box's sizes, and copy from it after run()");
  }
  const auto begin = offsets ? *std::move(offsets) : std::vector<std::int64_t>(static_cast<std::size_t>(into.dim()));
  if (static_cast<std::int64_t>(begin.size()) != into.dim()) {
    throw Error("'" + name + "' is wanted at " + in_brackets(begin) + ", but goes into a tensor of the shape " + in_brackets(into.sizes()));
  }
  const auto travels = dtype.value_or(into.scalar_type());
  if (travels != into.scalar_type() && !(c10::isFloatingType(travels) && c10::isFloatingType(into.scalar_type()))) {
    throw Error("'" + name + "' is to travel as " + dtype_name(travels) + " into a tensor of " + dtype_name(into.scalar_type()) +
                "; only floating-point tensors are converted");
  }
  return {.wanted = {.name = name,
                     .box = {.offsets = begin, .sizes = into.sizes().vec()},
                     .dtype = travels,
                     .is_converted = travels != into.scalar_type()},
          .into = into.detach()};
}

}  // namespace fsdp::weights
