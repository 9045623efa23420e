#pragma once

#include <vector>

#include "comm/device_sums.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {

/// Sums on a device for which somebody launches kernels of ours: those that are alike are one.
class DeviceSums {
 public:
  /// False if operators have to make this sum.
  bool add(const RankOrderSum& sum);
  /// All, on the current stream of each device.
  void launch() const;

 private:
  struct Launch {
    c10::Device device;
    DeviceSum sum;
  };
  std::vector<Launch> launches_;
};

}  // namespace fsdp::comm
