#include "engine/gradient_usage.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "base/on_host.h"
#include "base/stream_capture.h"
#include "comm/mesh/ranks.h"
#include "fsdp/error.h"

namespace fsdp::engine {
namespace {

class BitWriter {
 public:
  void append(bool value) {
    if (count_ % 8 == 0) bytes_.push_back(0);
    if (value) bytes_.back() |= static_cast<std::uint8_t>(1U << (count_ % 8));
    ++count_;
  }
  std::vector<std::uint8_t> take() { return std::move(bytes_); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t count_ = 0;
};

class BitReader {
 public:
  explicit BitReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool next() {
    const bool bit = ((bytes_[position_ / 8] >> (position_ % 8)) & 1U) != 0;
    ++position_;
    return bit;
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t position_ = 0;
};

}  // namespace

at::Tensor any_nan(const at::Tensor& tensor) { return at::isnan(tensor).any(); }

std::vector<GradientAccumulator*> exchange_usage(std::span<GradientAccumulator* const> gradients) {
  // For each unit, the first bit is set if it has unreduced gradients. Where [Sent as computed] applies, a bit is set if the unit has to
  // send them in the wire's dtype from now on. The next bits are set if its last gradient arrived after the first departure, after the
  // second, and so on. Then there is a bit for each of its parameters, which is set if this rank had a gradient of the parameter.
  BitWriter mine;
  for (const auto* of_unit : gradients) {
    mine.append(of_unit->collects());
    if (of_unit->agrees_on_dtype) mine.append(of_unit->sent_in == SentIn::kWireDtype || of_unit->arrived_twice);
    for (int n = 1; n < kLastDeparture; ++n) mine.append(of_unit->departures.last_gradient > n);
    for (const auto i : of_unit->held) mine.append(of_unit->parameters[i].contributed);
  }
  auto bits = mine.take();
  const Unit& first = gradients.front()->unit;
  comm::Ranks({first.communicators.outer, first.communicators.reduce})
      .unite(bits, first.label("exchange of which parameters have gradients"));

  std::vector<GradientAccumulator*> unreduced;
  BitReader all(bits);
  for (auto* of_unit : gradients) {
    Unit& unit = of_unit->unit;
    const bool is_left = all.next();
    if (is_left) unreduced.push_back(of_unit);
    if (of_unit->agrees_on_dtype && all.next()) of_unit->sent_in = SentIn::kWireDtype;
    of_unit->arrived_twice = false;
    int last_gradient = 1;
    for (int n = 1; n < kLastDeparture; ++n) last_gradient += all.next() ? 1 : 0;
    bool contributed = false;
    const bool fully = !unit.communicators.outer || unit.options.requires_all_reduce;
    for (const auto i : of_unit->held) {
      auto& parameter = of_unit->parameters[i];
      const bool now = all.next();
      const bool any = now || parameter.partial;
      contributed = contributed || now;
      parameter.contributed = false;
      parameter.partial = any && !fully;
      unit.parameters[i].has_gradient = (any && fully) || unit.parameters[i].has_gradient;
    }
    if (contributed) of_unit->departures.reduced_at = last_gradient;
    of_unit->left_to_end = is_left || (of_unit->reduced_unasked && contributed);
  }
  return unreduced;
}

void report_nan(std::span<const std::unique_ptr<GradientAccumulator>> gradients, std::int64_t rank) {
  refuse_in_capture(gradients.front()->unit.whole.buffer.storage.device(), "report_nan_in_param_grad", "leave it out");
  // This rank's number, then two values for each parameter: before its reduction, and after, in this rank's own piece of the result.
  std::vector<at::Tensor> flags;
  const auto none = at::scalar_tensor(false, at::kBool);
  for (const auto& of_unit : gradients) {
    const Unit& unit = of_unit->unit;
    for (const auto i : of_unit->held) {
      const auto before = std::exchange(of_unit->parameters[i].has_nan, {});
      flags.push_back(before.defined() ? before : none);
      const auto slice = unit.slice(i, unit.own_pieces());
      const bool reduced = unit.parameters[i].has_gradient && of_unit->valid && slice.numel > 0;
      flags.push_back(reduced ? any_nan(unit.main_gradient.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel)) : none);
    }
  }
  const auto found = at::cat({at::full({1}, rank, at::kInt), on_host(std::move(flags), at::kInt)});
  const Unit& first = gradients.front()->unit;
  const auto all = comm::Ranks({first.communicators.outer, first.communicators.reduce})
                       .exchange(found, {.operation = "report of NaN", .unit = "(all)", .model = first.place.model});
  if (!all.narrow(1, 1, all.size(1) - 1).any().item<bool>()) return;
  std::string text = "NaN in gradients of this backward:";
  const auto* values = all.const_data_ptr<std::int32_t>();
  std::size_t column = 1;
  for (const auto& of_unit : gradients) {
    for (const auto i : of_unit->held) {
      const auto& parameter = of_unit->unit.parameters[i];
      for (const char* when : {"before", "after"}) {
        std::string ranks;
        for (std::int64_t row = 0; row < all.size(0); ++row) {
          const auto* of_rank = values + row * found.numel();
          if (of_rank[column] != 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(of_rank[0]);
        }
        ++column;
        if (ranks.empty()) continue;
        text += "\n  parameter '" + parameter.name + "' of unit '" + of_unit->unit.name + "' " + when + " reduction, on rank " + ranks;
      }
    }
  }
  throw Error(text +
              "\nNaN before reduction was computed by that rank's backward; NaN only after it comes from infinities of opposite sign "
              "on several ranks. Gradients are kept: call zero_grad() to skip this step");
}

}  // namespace fsdp::engine
