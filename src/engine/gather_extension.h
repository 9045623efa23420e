#pragma once

#include <vector>

#include "comm/communicator.h"

namespace fsdp::engine {

/// Parameters of a unit that a front end gathers in a way of its own: it says what travels, and makes the whole parameters of what arrives
/// (FSDP2's fsdp_pre_all_gather and fsdp_post_all_gather). Their main and whole parameters are its own, in memory of its own; the engine
/// moves the bytes, together with the unit's other parameters, and reduces the gradients.
///
/// Called under the engine's lock, with gradients disabled: by Gatherer, and with nothing under way by the front end that made it. What it
/// does itself must not ask the engine for anything.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  /// What is to be gathered now, in tensors that live until finish() or free(). The same number of parts, of the same sizes, on all ranks.
  virtual std::vector<comm::GatherPart> start() = 0;
  /// It has arrived: the whole parameters are to be there when this returns.
  virtual void finish() = 0;
  /// The whole parameters go, or what start() began is given up.
  virtual void free() = 0;
};

}  // namespace fsdp::engine
