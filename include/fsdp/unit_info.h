#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "fsdp/device_mesh.h"

namespace fsdp {

/// The dtypes of a parameter and its gradient (MixedPrecisionPolicy with all defaults filled in).
struct UnitDtypes {
  at::ScalarType param = at::kFloat;       ///< The dtype of the gathered parameters, in which forward and backward compute.
  at::ScalarType main_param = at::kFloat;  ///< The dtype of the main parameters, which the optimizer updates.
  at::ScalarType main_grad = at::kFloat;   ///< The dtype of the reduced gradients, which the optimizer reads.
  at::ScalarType grad_comm = at::kFloat;   ///< The dtype in which gradients are sent.
  bool gather_format = false;              ///< Whether parameters are all-gathered in a GatherFormat instead of `param`.

  bool operator==(const UnitDtypes&) const = default;
};

/// One unit of a sharded model, as seen from this rank.
struct UnitInfo {
  std::string name;                     ///< The module's name; "(root)" for the root; for a group of modules, their names joined by "+".
  std::vector<std::string> parameters;  ///< Names, in the order of named_parameters().
  std::int64_t whole_bytes = 0;         ///< Bytes of the gathered parameters, in UnitDtypes::param, with their padding.
  std::int64_t shard_bytes = 0;         ///< Bytes of this rank's main parameters, in UnitDtypes::main_param, with padding.
  std::vector<UnitDtypes> dtypes;       ///< The dtypes of its parameters, each combination once.
  bool reshard_after_forward = true;    ///< The current value of FullyShardOptions::reshard_after_forward.
  /// The dimensions of its mesh. They have no names if the unit has a mesh of its own that is not a part of the model's.
  std::vector<MeshDim> mesh;
};

/// The units as a table, with a line for each, to print.
std::string to_string(const std::vector<UnitInfo>& units);
/// Writes the table of to_string() to a stream.
std::ostream& operator<<(std::ostream& stream, const std::vector<UnitInfo>& units);

}  // namespace fsdp
