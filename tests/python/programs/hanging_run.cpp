// Two ranks, of which the second one hangs in its own code, without any call of the library.

#include <fsdp/device_mesh.h>
#include <fsdp/launch.h>

#include <chrono>
#include <thread>

namespace {

void wait_for_ever() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1000));  // the line that is looked for
}

[[gnu::noinline]] void next_batch() { wait_for_ever(); }

}  // namespace

int main() {
  return fsdp::launch_local(2, [] {
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
    if (mesh.rank() == 1) next_batch();
    mesh.barrier();
    return 0;
  });
}
