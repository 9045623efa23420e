#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "base/device_functions.h"
#include "device.h"
#include "listener.h"
#include "streams.h"
#include "support/multi_rank.h"

// For tests on the simulated device (tests/device). Not in a program with logging_device.h: both are PrivateUse1.
namespace fsdp::testing {

// A report that a test does not take fails it.
inline const bool kReportsFailTests = (::testing::UnitTest::GetInstance()->listeners().Append(new sim::Listener), true);

inline c10::Stream current_stream(int device = 0) { return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(sim::device(device)); }
inline c10::Stream side_stream(int device = 0) {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStreamFromGlobalPool(sim::device(device));
}

/// What comes on `second` is behind what is on `first`.
inline void order(c10::Stream first, c10::Stream second) {
  c10::Event here(c10::kPrivateUse1);
  here.record(first);
  here.block(second);
}

/// Ranks with a device each, of their own number, whose reports fail the test. A backward needs a rank, too: it starts threads.
template <typename Fn>
void run_ranks_on_device(int nproc, const Fn& fn) {
  run_ranks(nproc, [&](int rank) {
    c10::impl::VirtualGuardImpl(c10::kPrivateUse1).setDevice(sim::device(rank));
    if constexpr (std::is_invocable_v<Fn, int>) {
      fn(rank);
    } else {
      fn();
    }
    sim::expect_no_reports();
  });
}

/// While it lives, the simulated device has no such kernel, and operators do its work.
template <typename Function>
class WithoutKernel {
 public:
  explicit WithoutKernel(DeviceFunctions<Function>& functions) : functions_(functions), before_(functions.set(sim::kType, nullptr)) {}
  ~WithoutKernel() { functions_.set(sim::kType, before_); }
  WithoutKernel(const WithoutKernel&) = delete;
  WithoutKernel& operator=(const WithoutKernel&) = delete;

 private:
  DeviceFunctions<Function>& functions_;
  Function* const before_;
};

/// Takes the one report that there has to be, which says this.
inline void expect_report(const std::string& text) {
  const auto reports = sim::take_reports();
  ASSERT_EQ(reports.size(), 1U) << "expected: " << text;
  EXPECT_NE(reports[0].find(text), std::string::npos) << reports[0] << "\n  does not say: " << text;
}

}  // namespace fsdp::testing
