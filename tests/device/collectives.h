#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

/// What a collective waits for before it runs, beside the stream's order. A real device runs few collectives at a time, and a message only
/// when sender and receiver are both there, so ranks whose collectives cross wait for ever. Here they run into the timeout.
enum class InTurn {
  kNo,             ///< Nothing: no order of the ranks' calls is wrong.
  kOfOneBackend,   ///< The ones before it of the same backend, and the peer of a message.
  kOfAllBackends,  ///< The ones before it of all backends of the process, too.
};

struct CollectivesOptions {
  InTurn in_turn = InTurn::kNo;
};

/// Collectives by NCCL's rules, for tensors of the device. They run on a stream of the backend's, behind what the current one holds at the
/// call; Work::wait() makes the then current stream wait, not the host. What they read they have read at the call, what they write arrives
/// when somebody waits. Ranks whose calls differ in number or size wait for each other until somebody aborts the backend. Sums are in the
/// tensors' dtype. Operations between startCoalescing() and endCoalescing() begin together there.
/// `messages` (Gloo) moves the bytes.
c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> messages, CollectivesOptions options = {});

}  // namespace sim
