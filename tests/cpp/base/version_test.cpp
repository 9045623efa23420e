#include "fsdp/version.h"

#include <gtest/gtest.h>

#include <string>

#include "test_paths.h"

namespace version_test {

TEST(Version, IsThatOfTheHeadersAndOfThePackage) {
  const auto headers =
      std::to_string(FSDP_VERSION_MAJOR) + "." + std::to_string(FSDP_VERSION_MINOR) + "." + std::to_string(FSDP_VERSION_PATCH);
  EXPECT_EQ(fsdp::version(), headers);
  EXPECT_EQ(fsdp::testing::kProjectVersion, headers);
}

}  // namespace version_test
