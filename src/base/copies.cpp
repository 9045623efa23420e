#include "base/copies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace fsdp {

void Copies::add(const at::Tensor& to, const at::Tensor& from) {
  const auto fits = [&](const Group& group) {
    const auto like = [](const at::Tensor& one, const at::Tensor& other) {
      return one.scalar_type() == other.scalar_type() && one.device() == other.device();
    };
    return like(group.to.front(), to) && like(group.from.front(), from);
  };
  const auto found = std::find_if(groups_.begin(), groups_.end(), fits);
  auto& group = found == groups_.end() ? groups_.emplace_back() : *found;
  group.to.push_back(to);
  group.from.push_back(from);
}

void Copies::run() {
  for (const auto& [to, from] : std::exchange(groups_, {})) at::_foreach_copy_(to, from, /*non_blocking=*/true);
}

}  // namespace fsdp
