#include "fsdp/stop_requested.h"

#include <csignal>

namespace fsdp {
namespace {

volatile std::sig_atomic_t asked_to_stop = 0;

void listen_to_signals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { asked_to_stop = 1; };
  action.sa_flags = SA_RESTART;  // A signal must not make a read or a write of the program fail.
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

}  // namespace

bool stop_requested(const DeviceMesh& mesh) {
  [[maybe_unused]] static const bool listens = (listen_to_signals(), true);
  return !mesh.all(asked_to_stop == 0);
}

}  // namespace fsdp
