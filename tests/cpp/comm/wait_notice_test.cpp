#include "comm/collectives/wait_notice.h"

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "support/collective_checks.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/temporary_folder.h"

namespace fsdp::comm {
namespace wait_notice_test {

/// What rank 0 prints while it waits twice for rank 1, for a gather and for a barrier.
void expect_notices(bool shared_memory, const std::string& folder, const std::string& of_gather, const std::string& of_barrier) {
  testing::run_ranks(2, [&](int rank) {
    setenv("FSDP_WAIT_NOTICE", "0.2", 1);
    setenv("FSDP_EVENTS", folder.c_str(), 1);
    const auto communicator = init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared_memory}).communicator("dp_shard");
    const at::Tensor full = at::empty({2});
    const GatherPart part{.full = full, .shard = full.narrow(0, rank, 1)};
    part.shard.fill_(1);
    communicator->barrier();
    const auto be_late = [&] {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    };
    ::testing::internal::CaptureStderr();
    be_late();
    communicator->all_gather({&part, 1}, testing::kGather)->wait();
    be_late();
    communicator->barrier();
    const auto said = ::testing::internal::GetCapturedStderr();
    const std::string start = "libfsdp: rank 0 has been waiting for rank 1 for 0 s, in the ";
    const auto expected = start + "all-gather of 'layers.0'" + of_gather + "\n" + start + "barrier" + of_barrier + "\n";
    EXPECT_EQ(said, rank == 0 ? expected : "");
  });
}

const std::string kHint = ". With FSDP_EVENTS=FOLDER, `fsdp why FOLDER` prints what it is doing.";

// Where ranks do not share memory, they may be on different hosts.
TEST(WaitNotice, NamesTheRankOnceInEachWait) {
  const std::string seen = "; rank 1 was last seen before its first forward. With FSDP_EVENTS=FOLDER, `fsdp why FOLDER` prints more.";
  expect_notices(false, "", seen, seen);
}

TEST(WaitNotice, KnowsTheLastCallWhereRanksShareMemory) {
  expect_notices(true, "", "; the last call of rank 1 was the barrier" + kHint,
                 "; the last call of rank 1 was the all-gather of 'layers.0'" + kHint);
}

TEST(WaitNotice, ReadsTheFilesOfOtherRanks) {
  const testing::TemporaryFolder folder;
  const auto seen = "; rank 1 was last seen before its first forward. `fsdp why " + folder.path().string() + "` prints more.";
  expect_notices(false, folder.path().string(), seen, seen);
}

}  // namespace wait_notice_test
}  // namespace fsdp::comm
