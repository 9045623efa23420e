#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "events/rank_replay.h"
#include "fsdp/wait_reason.h"

// What ranks waited for in their collectives. No communication, no engine.
namespace fsdp::report {

using events::Activity;
using events::Collective;
using events::CollectiveKey;

/// How much of the wait is for the last of the other ranks of the row to make the call. `last_call`, here and below: when that one did so,
/// in this rank's clock; 0 if it is not known.
std::int64_t late_part(const Collective& collective, std::int64_t last_call);
/// Whether that is most of it: the wait's cause is then what kept that rank.
bool is_for_peer(const Collective& collective, std::int64_t last_call);

/// Divides the wait for a collective among the reasons, in ns. `queued_bytes`: see queued_bytes().
std::array<std::int64_t, kWaitReasons> reasons_of(const Collective& collective, std::int64_t last_call, std::int64_t queued_bytes);

/// The bytes of the collectives that this rank had called before, and that were under way when all ranks had made this call.
std::int64_t queued_bytes(const Collective& collective, std::int64_t last_call, const std::map<CollectiveKey, Collective>& all);

}  // namespace fsdp::report
