#include "memory/pinned_memory.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <optional>

#include "memory/device_memory.h"

namespace fsdp::memory {
namespace pinned_memory_test {

const c10::Device kGpu(c10::kCUDA, 0);

/// A library of the name that CUDA's runtime has.
template <typename T>
T& of_fake(const char* name) {
  static void* const library = dlopen(FSDP_FAKE_CUDA_RUNTIME, RTLD_NOW);
  return *static_cast<T*>(dlsym(library, name));
}

std::map<void*, std::size_t>& pinned() { return of_fake<std::map<void*, std::size_t>>("fake_pinned"); }

TEST(PinnedMemory, IsOfTheBytesThatAreAskedForAndZero) {
  ASSERT_TRUE(pinned().empty());
  constexpr std::int64_t kBytes = (std::int64_t{3} << 20) + 4096;
  {
    const auto block = allocate_pinned(kGpu, kBytes);
    ASSERT_TRUE(block);
    EXPECT_TRUE(block.device().is_cpu());
    EXPECT_EQ(pinned(), (std::map<void*, std::size_t>{{block.get(), kBytes}}));
    const auto* bytes = static_cast<const char*>(block.get());
    EXPECT_EQ(bytes[0], 0);
    EXPECT_EQ(bytes[kBytes - 1], 0);
  }
  EXPECT_TRUE(pinned().empty()) << "it is unpinned before it goes, though this build has no such device to wait for";
}

TEST(PinnedMemory, HoldsWhatIsOffloadedFromAGpu) {
  ASSERT_TRUE(pinned().empty());
  constexpr std::int64_t kBytes = std::int64_t{1} << 20;
  {
    const auto zeros = host_zeros(kGpu, kBytes);
    const auto gradients = allocate_host(kGpu, kBytes);
    EXPECT_EQ(pinned(), (std::map<void*, std::size_t>{{zeros.data_ptr(), kBytes}, {gradients.get(), kBytes}}));
    EXPECT_TRUE(zeros.device().is_cpu());
    EXPECT_FALSE(zeros.any().item<bool>());
  }
  EXPECT_TRUE(pinned().empty());
}

TEST(PinnedMemory, IsNoneWhereTheRuntimeRefuses) {
  ASSERT_TRUE(pinned().empty());
  of_fake<bool>("fake_refuses") = true;
  EXPECT_FALSE(allocate_pinned(kGpu, 4096));
  of_fake<bool>("fake_refuses") = false;
  EXPECT_EQ(of_fake<int>("fake_errors_read"), 1) << "torch must not find the error";
  EXPECT_FALSE(allocate_pinned(c10::kCPU, 4096));
}

}  // namespace pinned_memory_test
}  // namespace fsdp::memory
