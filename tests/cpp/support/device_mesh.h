#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "collectives.h"
#include "comm/mesh/rendezvous.h"
#include "fsdp/device_mesh.h"
#include "support/on_device.h"

namespace fsdp::testing {

/// Gloo's, which moves the bytes of the device's collectives.
inline c10::intrusive_ptr<c10d::Backend> gloo_for_device(const comm::DeviceGroupOptions& group) {
  auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(group.store, group.row.rank, group.row.size(), options);
}

/// init_device_mesh("sim", dims), where rank r has device r.
inline DeviceMesh device_mesh(std::vector<MeshDim> dims, MeshOptions options = {}) {
  comm::register_device_groups(c10::kPrivateUse1, [](const auto& group) { return sim::make_collectives(gloo_for_device(group)); });
  return init_device_mesh("sim", std::move(dims), options);
}

}  // namespace fsdp::testing
