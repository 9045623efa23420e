#pragma once

#include <functional>
#include <string>

#include "checkpoint/dcp_metadata.h"
#include "fsdp/save_load.h"
#include "state/source.h"

// The program's own values in a checkpoint. As in DCP, dictionaries, and lists that contain tensors or dictionaries, are taken apart. Each
// value becomes an item of its own, whose path says where it belongs.
namespace fsdp::state {

/// Calls `add` for each item into which `extra` is taken apart, with its path below `path`. An item is a tensor, or a value that contains
/// no tensor. Throws Error for an undefined tensor.
void for_each_item(const ckpt::DcpPath& path, const ExtraState& extra,
                   const std::function<void(const ckpt::DcpPath& path, const at::Tensor& tensor)>& add_tensor,
                   const std::function<void(const ckpt::DcpPath& path, ckpt::PythonValue value)>& add_value);

/// Reads all values whose names begin with `prefix` ("extra."), and puts dictionaries and lists together again. Throws Error.
ExtraState extra_below(Source& source, const std::string& prefix, const std::function<bool(const std::string& name)>& is_ignored = {});

}  // namespace fsdp::state
