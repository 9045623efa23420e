#pragma once

namespace fsdp::engine {

/// Opaque owner of the memory budget's decision, so that the engine does not depend on plan/.
class MemoryChoice {
 public:
  virtual ~MemoryChoice() = default;
};

}  // namespace fsdp::engine
