#include "comm/collectives/stall_watch.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "comm/launch/launch.h"
#include "support/collective_checks.h"
#include "support/meshes.h"
#include "support/messages.h"

namespace fsdp::comm {
namespace stall_watch_test {

using testing::has;
using testing::message_of;

// One rank ends while large messages are on their way from and to it: Gloo tells nobody who waits for a message that was half there.
class StallWatchOfSize : public ::testing::TestWithParam<int> {};

TEST_P(StallWatchOfSize, EndsWaitsForMessagesThatWereHalfThere) {
  for (const int microseconds : {0, 3'000, 10'000, 30'000, 60'000}) {
    ::testing::internal::CaptureStderr();
    const int result = launch_ranks(
        GetParam(),
        [&] {
          alarm(60);
          const auto communicator = init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = false}).communicator("dp_shard");
          const std::int64_t numel = 16'000'000;
          const at::Tensor full = at::empty({communicator->size() * numel});
          const GatherPart part{.full = full, .shard = full.narrow(0, communicator->rank() * numel, numel)};
          part.shard.fill_(1);
          communicator->barrier();
          std::thread death;
          if (communicator->rank() == 1) {
            death = std::thread([&] {
              usleep(static_cast<useconds_t>(microseconds));
              kill(getpid(), SIGKILL);
            });
          }
          const std::string message = message_of<CommError>([&] {
            for (;;) communicator->all_gather({&part, 1}, testing::kGather)->wait();
          });
          if (!has(message, "all-gather of unit 'layers.0' on rank") || !has(message, "has failed or ended"))
            throw Error("message: " + message);
          return 0;
        },
        {});
    EXPECT_EQ(result, 1);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 was killed by signal 9 (Killed)\n") << microseconds;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, StallWatchOfSize, ::testing::Values(2, 3, 4));

// A root that has everything behind it only sends.
TEST(StallWatch, EndsWaitsOfWhoOnlySends) {
  ::testing::internal::CaptureStderr();
  const int result = launch_ranks(2,
                                  [] {
                                    alarm(60);
                                    const auto communicator = testing::line().communicator("dp_shard");
                                    const at::Tensor shard = at::ones({64'000'000});
                                    ScatterPart part{.shards = {}, .into = communicator->rank() == 0 ? shard : at::empty_like(shard)};
                                    if (communicator->rank() == 0) part.shards = {shard, shard};
                                    communicator->barrier();
                                    std::thread death;
                                    if (communicator->rank() == 1) {
                                      death = std::thread([] {
                                        usleep(20'000);
                                        kill(getpid(), SIGKILL);
                                      });
                                    }
                                    const std::string message = message_of<CommError>([&] {
                                      for (;;) communicator->scatter({&part, 1}, 0, testing::kScatter)->wait();
                                    });
                                    if (!has(message, "scatter of unit 'layers.0' on rank 0 of 2 failed"))
                                      throw Error("message: " + message);
                                    return 0;
                                  },
                                  {});
  EXPECT_EQ(result, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 was killed by signal 9 (Killed)\n");
}

}  // namespace stall_watch_test
}  // namespace fsdp::comm
