#pragma once

#include <functional>
#include <string>

#include "checkpoint/dcp_metadata.h"
#include "fsdp/save_load.h"
#include "state/source.h"

// The program's own values, in a checkpoint. As DCP does it, dictionaries, and lists with tensors or dictionaries, are taken apart: each
// value has an item of its own, whose path says where it belongs.
namespace fsdp::state {

/// Calls `add` for each item that `extra` comes to below `path`: with a tensor, or with a value that has none in it. Throws Error for an
/// undefined tensor.
void for_each_item(const ckpt::DcpPath& path, const ExtraState& extra,
                   const std::function<void(const ckpt::DcpPath& path, const at::Tensor& tensor)>& add_tensor,
                   const std::function<void(const ckpt::DcpPath& path, ckpt::PythonValue value)>& add_value);

/// All values whose names begin with `prefix` ("extra."), put together again. Throws Error.
ExtraState extra_below(Source& source, const std::string& prefix, const std::function<bool(const std::string& name)>& is_ignored = {});

}  // namespace fsdp::state
