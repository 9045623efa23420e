#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The names of rows of a mesh in events.
namespace fsdp::events {

/// The dimension and the global ranks in order, as "dp_shard 0-7", "dp_replicate 1-13:4" (each fourth), or "ep 0 1 5 6".
std::string name_of_row(std::string_view dim, std::span<const std::int64_t> ranks);

/// Returns the ranks of such a name, in order. For another text, returns those that can be read.
std::vector<std::int64_t> ranks_of_row(std::string_view name);

}  // namespace fsdp::events
