#include "fsdp/placements.h"

#include <gtest/gtest.h>

#include "fsdp/error.h"

namespace placements_test {

using fsdp::Placements;

TEST(Placements, HaveNamesAndLevels) {
  EXPECT_EQ(Placements::from_name("no_shard"), Placements::no_shard());
  EXPECT_EQ(Placements::from_name("optim"), Placements::optim());
  EXPECT_EQ(Placements::from_name("optim_grads"), Placements::optim_grads());
  EXPECT_EQ(Placements::from_name("optim_grads_params"), Placements::optim_grads_params());
  EXPECT_EQ(Placements::from_name("0"), Placements::no_shard());
  EXPECT_EQ(Placements::from_name("1"), Placements::optim());
  EXPECT_EQ(Placements::from_name("2"), Placements::optim_grads());
  EXPECT_EQ(Placements::from_name("3"), Placements::optim_grads_params());
  EXPECT_THROW(Placements::from_name("4"), fsdp::Error);
}

}  // namespace placements_test
