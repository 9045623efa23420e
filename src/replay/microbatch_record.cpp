#include "replay/microbatch_record.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "replay/digest.h"

namespace fsdp::replay {
namespace {

std::int64_t digest_of_all(std::span<const comm::ReducePart> parts, at::Tensor comm::ReducePart::*which) {
  std::int64_t all = 0;
  for (std::size_t k = 0; k < parts.size(); ++k) all = with_digest(all, digest(parts[k].*which), k);
  return all;
}

/// By address: replicated gradients are reduced in the memory of the main gradients, through another storage.
bool lies_within(const at::Tensor& inner, const at::Tensor& outer) {
  const auto* begin = static_cast<const char*>(outer.const_data_ptr());
  const auto* at = static_cast<const char*>(inner.const_data_ptr());
  return at >= begin && at < begin + outer.nbytes();
}

}  // namespace

std::vector<std::int64_t> digests_of_whole(const engine::Unit& unit) {
  const auto pieces = unit.layout.world_size();
  std::vector<std::int64_t> all(static_cast<std::size_t>(pieces) + 1, 0);
  const auto& parts = unit.whole.buffer.parts;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (unit.formats[k].extended || unit.formats[k].gather) continue;
    const auto of_part = digests(parts[k], pieces);
    for (std::size_t piece = 0; piece < of_part.size(); ++piece) all[piece] = with_digest(all[piece], of_part[piece], k);
  }
  // A format's data are put into places of its own, between which there may be bytes that are never set.
  for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto& format = unit.formats[unit.layout.positions()[i].sub_buffer];
    if (format.extended || !format.gather) continue;
    all.back() = with_digest(all.back(), digest(unit.whole_parameter(parts, i)), i);
  }
  return all;
}

void MicrobatchRecord::entered(const engine::Unit& unit) { look_at_whole(unit); }

// Without an entry in this microbatch, they are those of an earlier step, and stale if the program has written the main parameters since.
void MicrobatchRecord::frees(const engine::Unit& unit) {
  if (!units_[unit.place.index].whole.empty()) look_at_whole(unit);
}

void MicrobatchRecord::look_at_whole(const engine::Unit& unit) {
  auto& record = units_[unit.place.index];
  record.written = record.written || unit.whole.written;
  if (record.written) return;
  const at::NoGradGuard no_grad;
  auto now = digests_of_whole(unit);
  if (record.whole.empty()) {
    record.whole = std::move(now);
  } else {
    record.whole_changed = record.whole_changed || now != record.whole;
  }
}

void MicrobatchRecord::arrived(const engine::Unit& unit, std::size_t parameter, const at::Tensor& gradient) {
  auto& record = units_[unit.place.index];
  if (record.order < 0) record.order = with_gradients_++;
  if (gradient.is_sparse()) return;  // The engine refuses it.
  record.gradients = with_digest(record.gradients, digest(gradient), parameter);
}

void MicrobatchRecord::collected(const engine::Unit& unit, std::span<const at::Tensor> unreduced, bool of_one_backward) {
  auto& record = units_[unit.place.index];
  // What arrives behind a sum with earlier gradients is a part of this microbatch's, and no digest of all of them.
  record.added_up = record.added_up || !of_one_backward;
  if (record.added_up) {
    record.unreduced = 0;
    return;
  }
  for (std::size_t k = 0; k < unreduced.size(); ++k) {
    if (unreduced[k].defined()) record.unreduced = with_digest(record.unreduced, digest(unreduced[k]), k);
  }
}

// [Order is collective] All ranks are here at the same moment, so the reduction is made once more, into other memory, before the real one.
// Sums are in the order of the ranks, so that both have the same bits.
void MicrobatchRecord::reduces(const engine::Unit& unit, std::size_t sub_buffer, comm::Communicator& ranks,
                               std::span<const comm::ReducePart> parts, double scale) {
  if (reductions_ == Reductions::kOnce || ranks.is_alone()) return;
  const at::NoGradGuard no_grad;
  std::vector<comm::ReducePart> again;
  for (const auto& part : parts) {
    auto other = part;
    other.out = part.accumulate ? part.out.clone() : at::empty_like(part.out);
    if (part.staging.defined()) other.staging = at::empty_like(part.staging);
    if (part.encoding && part.encoding->lost.defined()) other.encoding->lost = part.encoding->lost.clone();
    again.push_back(std::move(other));
  }
  const auto unreduced = digest_of_all(parts, &comm::ReducePart::unreduced);
  ranks.reduce_scatter(again, scale, unit.label("reduce-scatter for a check"))->wait();
  running_[{unit.place.index, sub_buffer}] = {
      .parts = {parts.begin(), parts.end()}, .sums = digest_of_all(again, &comm::ReducePart::out), .unreduced = unreduced};
}

void MicrobatchRecord::reduced(const engine::Unit& unit, std::size_t sub_buffer) {
  const auto running = std::exchange(running_[{unit.place.index, sub_buffer}], {});
  if (running.parts.empty()) return;
  const at::NoGradGuard no_grad;
  auto& record = units_[unit.place.index];
  record.sums_differ = record.sums_differ || digest_of_all(running.parts, &comm::ReducePart::out) != running.sums;
  // A result may lie within what was reduced.
  bool in_place = false;
  for (const auto& part : running.parts) in_place = in_place || lies_within(part.out, part.unreduced);
  if (!in_place && digest_of_all(running.parts, &comm::ReducePart::unreduced) != running.unreduced) record.unreduced_changed = true;
}

}  // namespace fsdp::replay
