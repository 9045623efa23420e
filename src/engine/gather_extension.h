#pragma once

#include <vector>

#include "comm/communicator.h"

namespace fsdp::engine {

/// Lets a front end gather some parameters of a unit in its own way (FSDP2's fsdp_pre_all_gather and fsdp_post_all_gather). The extension
/// decides which bytes are sent, and makes the unsharded parameters from the bytes that arrive. It keeps the main and the unsharded
/// parameters in memory of its own. The engine moves the bytes, together with the unit's other parameters, and reduces the gradients.
///
/// Called under the engine's lock, with gradients disabled: by Gatherer, and with nothing under way by the front end that made it. Its
/// functions must not call the engine.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  /// Returns the parts to be gathered now, in tensors that stay alive until finish() or free(). All ranks return the same number of parts,
  /// of the same sizes.
  virtual std::vector<comm::GatherPart> start() = 0;
  /// Called when the parts have arrived. The unsharded parameters must exist when it returns.
  virtual void finish() = 0;
  /// Frees the unsharded parameters, or abandons the gather that start() began.
  virtual void free() = 0;
};

}  // namespace fsdp::engine
