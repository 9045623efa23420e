#pragma once

#include <vector>

#include "comm/device_sums.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {

/// Collects sums on a device for which a launcher of this library's kernels is registered. One kernel computes all sums that are alike.
class DeviceSums {
 public:
  /// Returns false if operators have to compute this sum.
  bool add(const RankOrderSum& sum);
  /// Launches all sums, on the current stream of each device.
  void launch() const;

 private:
  struct Launch {
    c10::Device device;
    DeviceSum sum;
  };
  std::vector<Launch> launches_;
};

}  // namespace fsdp::comm
