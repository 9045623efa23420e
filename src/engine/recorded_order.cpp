#include "engine/recorded_order.h"

#include <mutex>

namespace fsdp::engine {

std::vector<std::size_t> recorded_order(Engine& engine, Pass pass) {
  const auto lock = engine.lock();
  auto order = engine.schedule_.recorded(pass);
  if (pass == Pass::kForward || order.empty()) return order;
  // There was no move to the units in which backward began.
  const auto forward = engine.schedule_.recorded(Pass::kForward);
  std::vector<std::size_t> began_in;
  for (auto last = forward.rbegin(); last != forward.rend(); ++last) {
    if (!began_in.empty() && !encloses(*engine.units_[began_in.back()], *engine.units_[*last])) break;
    began_in.push_back(*last);
  }
  if (!began_in.empty() && order.front() == began_in.back()) began_in.pop_back();
  order.insert(order.begin(), began_in.begin(), began_in.end());
  return order;
}

}  // namespace fsdp::engine
