#pragma once

#include <gtest/gtest.h>

#include "device.h"

namespace sim {

/// Fails the current test for each report.
inline void expect_no_reports() {
  for (const auto& report : take_reports()) ADD_FAILURE() << "sim: " << report;
}

/// A test that leaves reports fails, though it does not look for them.
class Listener final : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override { expect_no_reports(); }
};

}  // namespace sim
