// What a process keeps of its events, and who reads it.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "fsdp/timeline.h"
#include "report/event_files.h"
#include "support/multi_rank.h"
#include "support/temporary_folder.h"

namespace write_timeline_test {

using fsdp::testing::run_ranks;
using fsdp::testing::TemporaryFolder;

TEST(KeepEvents, OfAPartOfAMeshAreThoseOfAllRanks) {
  const TemporaryFolder folder;
  run_ranks(4, [&](int) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"dp_replicate", 2}, {"dp_shard", 2}});
    fsdp::keep_events(folder.path(), grid["dp_shard"]);
    grid.barrier();
  });
  const auto [ranks, left_out] = fsdp::report::read_run(folder.path());
  EXPECT_EQ(left_out, std::vector<std::string>());
  ASSERT_EQ(ranks.size(), 4U);
  for (std::size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks[rank].writer.rank, static_cast<std::int64_t>(rank));
}

}  // namespace write_timeline_test
