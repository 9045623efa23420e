#include "engine/arrived_gradients.h"

#include <algorithm>
#include <utility>

#include "base/copies.h"
#include "comm/parts.h"

namespace fsdp::engine {
namespace {

/// It may be read until the reduction has ended: nothing else can write it, because autograd transfers its ownership.
bool is_own(const at::Tensor& gradient) { return gradient.use_count() == 1 && gradient.storage().use_count() == 1; }

bool is_whole(const at::Tensor& gradient, const at::Tensor& part) {
  return gradient.scalar_type() == part.scalar_type() && gradient.numel() == part.numel() && gradient.is_contiguous() &&
         gradient.storage_offset() == 0 && !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

void ArrivedGradients::copy() {
  Copies copies;
  for (const auto& [parameter, view, gradient] : std::exchange(waiting_, {})) copies.add(view, gradient);
  copies.run();
}

bool ArrivedGradients::settle(const layout::UnitLayout& layout, const Buffer& buffer, bool may_lend) {
  lent_.resize(buffer.parts.size());
  std::erase_if(waiting_, [&](Waiting& waiting) {
    const auto k = layout.positions()[waiting.parameter].sub_buffer;
    if (!may_lend || !is_own(waiting.gradient) || !is_whole(waiting.gradient, buffer.parts[k])) return false;
    lent_[k] = comm::flat_view(waiting.gradient, 0, waiting.gradient.numel());
    return true;
  });
  copy();
  for (std::size_t k = 0; k < lent_.size(); ++k) {
    if (buffer.parts[k].defined() && !lent_[k].defined()) return false;
  }
  return true;
}

void ArrivedGradients::clear() {
  waiting_.clear();
  lent_.clear();
}

}  // namespace fsdp::engine
