#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/mesh/ranks.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// What ranks have in common when a model is formed on them.
struct Agreement {
  std::uint64_t model = 0;  ///< One more than any of the ranks has given to another model.
  bool same_text = true;
  bool same_values = true;
};

/// A number for a model on these ranks, and whether they all have the same text of it, and the same checksums of its first values.
/// Collective, one small exchange.
Agreement agree_on_model(const comm::Ranks& ranks, const std::string& text, std::span<const std::int64_t> first_values = {});

/// What is compared of a unit, beside its parameters.
struct UnitText {
  std::string settings;
  std::vector<std::int64_t> first_values;  ///< Checksums, one for each parameter; 0: it is not compared.
};

/// Gives units their model's number, and compares what the ranks have of them. Units on the same ranks speak together. Collective over the
/// ranks of each. Throws Error on all ranks if parameters or settings differ, with the lines that do. If only first values do, a warning is
/// returned.
std::string agree(std::span<const std::unique_ptr<Unit>> units, std::span<const UnitText> texts);

}  // namespace fsdp::engine
