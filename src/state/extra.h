#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "fsdp/save_load.h"
#include "state/source.h"

// The program's own values in a checkpoint. As in DCP, dictionaries, and lists that contain tensors or dictionaries, are flattened. Each
// value becomes an item of its own, whose path is its place.
namespace fsdp::state {

inline constexpr const char* kExtraPrefix = "extra.";

/// Calls `add` for each item of the flattened `extra`, with its path below `path`. An item is a tensor, or a value that contains no tensor.
/// Throws Error for an undefined tensor.
void for_each_item(const ckpt::DcpPath& path, const ExtraState& extra,
                   const std::function<void(const ckpt::DcpPath& path, const at::Tensor& tensor)>& add_tensor,
                   const std::function<void(const ckpt::DcpPath& path, ckpt::PythonValue value)>& add_value);

/// A value, and its path below a dictionary. The first part of the path is a text.
using StoredItem = std::pair<ckpt::DcpPath, StoredValue>;
/// Reads all values whose names begin with `prefix` ("extra."), which stands for a dictionary. Throws Error.
std::vector<StoredItem> items_below(Source& source, const std::string& prefix,
                                    const std::function<bool(const std::string& name)>& is_ignored = {});

/// Reads the same values, and rebuilds dictionaries and lists. Throws Error.
ExtraState extra_below(Source& source, const std::string& prefix, const std::function<bool(const std::string& name)>& is_ignored = {});

/// Returns the beginning of the names of a rank's own values.
std::string rank_extra_prefix(std::int64_t rank);
/// Returns the number of ranks that saved; 0 if it is not known. Throws Error.
std::int64_t saved_ranks(Source& source);

}  // namespace fsdp::state
