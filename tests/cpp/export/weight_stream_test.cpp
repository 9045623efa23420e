// A stream of weights when a rank has no memory.

#include "export/weight_stream.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>

#include "export/pieces.h"
#include "fsdp/fsdp.h"
#include "support/failing_operator.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace weight_stream_test {

using fsdp::testing::FailingOperator;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;

TEST(WeightStream, AnOperatorThatFailsOnOneRankIsAnErrorAndNoHang) {
  run_ranks(4, [](int rank) {
    int failures = 0, told = 0;
    // The buckets are the rows; the columns, which are put in order behind the gather; what all have; and the buffer.
    for (int others = 0; others < 40; ++others) {
      SCOPED_TRACE(others);
      const auto grid = fsdp::init_device_mesh("cpu", {{"dp_shard", 2}, {"tp", 2}});
      const bool is_first = grid.coordinate("tp") == 0;
      fsdp::testing::PiecesImpl model(is_first ? 0 : 3, is_first ? 3 : 10);
      model.register_buffer("buffer", at::ones(3));
      const auto handle = fsdp::testing::shard_pieces(model, grid);
      const auto live = handle.memory_stats().gathered_parameters.live;
      auto weights = fsdp::full_weights(model, {.bucket_bytes = 1});
      auto bucket = weights.begin();
      const auto failure = message_of<std::runtime_error>([&] {
        const FailingOperator operators;
        if (rank == 1) FailingOperator::arm(others);
        ++bucket;
      });
      if (failure.starts_with("planned failure")) ++failures;
      const auto text = failure != "no error" ? failure : message_of<std::runtime_error>([&] {
        while (bucket != weights.end()) ++bucket;
      });
      if (has(text, "rank 1 has failed before bucket 4 of 4")) ++told;
      EXPECT_TRUE(text == "no error" || has(text, "fail")) << text;
      weights.close();
      EXPECT_EQ(handle.memory_stats().gathered_parameters.live, live);
    }
    EXPECT_EQ(failures > 0, rank == 1);
    EXPECT_EQ(told > 0, rank != 1);
  });
}

}  // namespace weight_stream_test
