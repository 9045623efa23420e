#pragma once

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "comm/collectives/shared_communicator.h"
#include "fsdp/device_mesh.h"
#include "memory/shared_heap.h"
#include "support/messages.h"

namespace fsdp::testing {

/// Tests of shared memory itself: the variable that turns it off for all others is not for them.
class SharedMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* value = std::getenv("FSDP_SHARED_MEMORY")) variable_ = value;
    unsetenv("FSDP_SHARED_MEMORY");
  }
  void TearDown() override {
    if (!variable_.empty()) setenv("FSDP_SHARED_MEMORY", variable_.c_str(), 1);
  }

 private:
  std::string variable_;
};

inline std::shared_ptr<comm::Communicator> world(bool shared = true) {
  return init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared}).communicator("dp_shard");
}

inline bool shares(const comm::Communicator& communicator) {
  return dynamic_cast<const comm::SharedCommunicator*>(&communicator) != nullptr;
}

/// A copy in the shared heap. One element too far, so that addresses are odd.
inline at::Tensor in_heap(const at::Tensor& tensor) {
  const auto numel = tensor.numel() + 1;
  auto memory = memory::SharedHeap::opened()->allocate(numel * static_cast<std::int64_t>(tensor.itemsize()));
  const auto bytes = static_cast<std::size_t>(numel) * tensor.itemsize();
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory), nullptr, /*resizable=*/false);
  return at::empty({0}, tensor.options()).set_(c10::Storage(std::move(storage)), 1, {tensor.numel()}, {1}).copy_(tensor);
}

/// Mappings of shared heaps that this process has, its descriptors of them, and of the processes that they belong to.
inline int traces_of_heaps() {
  int traces = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) traces += has(line, "memfd:libfsdp");
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    traces += has(target, "memfd:libfsdp") || has(target, "[pidfd]");
  }
  return traces;
}

/// The thread that advances collectives lets go of what it listens to a moment later.
inline bool leaves_no_trace() {
  for (int i = 0; i < 500; ++i) {
    if (traces_of_heaps() == 0) return true;
    usleep(10'000);
  }
  return false;
}

}  // namespace fsdp::testing
