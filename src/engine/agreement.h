#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/mesh/ranks.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// The result of agree_on_model().
struct Agreement {
  std::uint64_t model = 0;  ///< The number of the model: greater than all that the ranks have given to other models.
  bool same_text = true;
  bool same_values = true;
};

/// Chooses a number for a model on these ranks, and compares the ranks' texts about it and the checksums of its initial values. Collective,
/// one small exchange.
Agreement agree_on_model(const comm::Ranks& ranks, const std::string& text, std::span<const std::int64_t> first_values = {});

/// The facts of a unit that are compared in addition to its parameters.
struct UnitText {
  std::string settings;
  std::vector<std::int64_t>
      first_values;  ///< Checksums of initial values, one for each parameter. 0 means that the parameter is not compared.
};

/// Initial values that differ between ranks.
struct DifferentValues {
  const Unit* unit = nullptr;
  std::size_t parameter = 0;  ///< The first parameter of the unit that differs.
  std::string text;           ///< A warning.
};

/// Gives the units the number of their model, and compares the ranks' descriptions of them. Units on the same ranks share one exchange.
/// Collective over the ranks of each unit. Throws Error on all ranks, with the lines that differ, if parameters or settings differ. If only
/// initial values differ, returns the first difference of each set of ranks, which all ranks of the set get. It names ranks
/// by their `global_rank`.
std::vector<DifferentValues> agree(std::span<const std::unique_ptr<Unit>> units, std::span<const UnitText> texts, std::int64_t global_rank);

}  // namespace fsdp::engine
