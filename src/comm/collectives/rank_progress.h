#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "events/event.h"

namespace fsdp::comm {

/// How far a rank has come, as its events have it.
struct RankProgress {
  std::map<std::string, std::uint64_t> last_numbers;  ///< Of its calls, by the name of the row.
  bool waits = false;                                 ///< For any collective.
  std::string activity;                               ///< "in backward of 'blocks.5'".
};

/// The same from events in their order. `rows` has the names of rows by their sources.
RankProgress progress_of(std::span<const events::Event> events, const std::function<std::string_view(std::uint32_t name)>& text_of,
                         const std::map<std::uint32_t, std::string>& rows);

}  // namespace fsdp::comm
