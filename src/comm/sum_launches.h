#pragma once

#include <vector>

#include "comm/device_sums.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {

/// Collects sums on a device for which somebody launches kernels of ours. One kernel makes all that are alike.
class DeviceSums {
 public:
  /// Returns false if operators have to make this sum.
  bool add(const RankOrderSum& sum);
  /// Launches all of them, on the current stream of each device.
  void launch() const;

 private:
  struct Launch {
    c10::Device device;
    DeviceSum sum;
  };
  std::vector<Launch> launches_;
};

}  // namespace fsdp::comm
