#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// What ranks have in common when a model is formed on them.
struct Agreement {
  std::uint64_t model = 0;  ///< One more than any of the ranks has given to another model.
  bool same_text = true;
};

/// A number for a model on these ranks, and whether they all have the same text of it. Collective, one small exchange.
Agreement agree_on_model(const comm::Ranks& ranks, const std::string& text);

/// Gives units their model's number, and compares what the ranks have of them: the parameters and `settings`, a text for each unit. Units
/// on the same ranks speak together. Collective over the ranks of each; nothing is sent if no rank has a peer. Throws Error on all ranks if
/// they differ, with the lines that do.
void agree(std::span<const std::unique_ptr<Unit>> units, std::span<const std::string> settings);

}  // namespace fsdp::engine
