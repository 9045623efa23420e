#pragma once

namespace fsdp::engine {

/// What a memory budget has chosen for a model. Whoever chose knows more; the engine keeps it.
class MemoryChoice {
 public:
  virtual ~MemoryChoice() = default;
};

}  // namespace fsdp::engine
