#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "events/rank_replay.h"
#include "fsdp/wait_reason.h"

// The reasons of waits in collectives. It needs neither communication nor an engine.
namespace fsdp::report {

using events::Activity;
using events::Collective;
using events::CollectiveKey;

/// Returns the part of the wait until the last of the other ranks of the row has made the call. `last_call`, here and below: the time of
/// that call, in this rank's clock; 0 if it is not known.
std::int64_t late_part(const Collective& collective, std::int64_t last_call);
/// True if this is most of the wait. The cause of the wait is then the delay of that rank.
bool is_for_peer(const Collective& collective, std::int64_t last_call);

/// Divides the wait for a collective among the reasons, in ns. `queued_bytes`: see queued_bytes().
std::array<std::int64_t, kWaitReasons> reasons_of(const Collective& collective, std::int64_t last_call, std::int64_t queued_bytes);

/// Returns the bytes of the collectives that this rank had called before, and that were under way when all ranks had made this call.
std::int64_t queued_bytes(const Collective& collective, std::int64_t last_call, const std::map<CollectiveKey, Collective>& all);

}  // namespace fsdp::report
