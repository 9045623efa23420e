#include "comm/host_memory/hosts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace fsdp::comm {
namespace hosts_test {

/// A rank's host per letter; '-' is one that does not say.
std::vector<Boot> hosts(const std::string& letters) {
  std::vector<Boot> boots(letters.size());
  for (std::size_t i = 0; i < letters.size(); ++i) {
    if (letters[i] != '-') boots[i].id[0] = letters[i];
  }
  return boots;
}

TEST(RanksPerHost, AreCountedWhereAllHostsHaveAsManyInOrder) {
  EXPECT_EQ(ranks_per_host(hosts("aabb")), 2);
  EXPECT_EQ(ranks_per_host(hosts("aaabbbccc")), 3);
  EXPECT_EQ(ranks_per_host(hosts("aaaa")), 4);
  EXPECT_EQ(ranks_per_host(hosts("abcd")), 1);
  EXPECT_EQ(ranks_per_host(hosts("a")), 1);
}

TEST(RanksPerHost, OfOtherLayoutsAreOne) {
  for (const char* layout : {"abab", "aabbaa", "aab", "aaabb", "abbb", "aaba", "abba", "--", "aa--", "-", ""}) {
    EXPECT_EQ(ranks_per_host(hosts(layout)), 1) << layout;
  }
}

TEST(Boot, IsKnownAndTheSameOnOneHost) {
  const Boot boot = Boot::of_this_host();
  EXPECT_TRUE(boot.is_known());
  EXPECT_GE(std::strlen(boot.id), 36U) << "shorter than a UUID";
  EXPECT_TRUE(boot == Boot::of_this_host());
  EXPECT_FALSE(boot == Boot{});
}

}  // namespace hosts_test
}  // namespace fsdp::comm
