#include "memory/shared_heap.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "memory/device_memory.h"

namespace fsdp::memory {
namespace shared_heap_test {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

std::int64_t pages_of(const SharedHeap& heap) {
  struct stat file {};
  fstat(heap.fd(), &file);
  return file.st_blocks * 512;
}

TEST(SharedHeap, IsOneForTheProcessAndGoesWithItsLastOwner) {
  EXPECT_EQ(SharedHeap::opened(), nullptr);
  auto heap = SharedHeap::open();
  EXPECT_EQ(SharedHeap::open(), heap);
  auto block = heap->allocate(100);
  heap.reset();
  EXPECT_NE(SharedHeap::opened(), nullptr);  // The block keeps it.
  block = {};
  EXPECT_EQ(SharedHeap::opened(), nullptr);
}

TEST(SharedHeap, BlocksAreApartAndTheirPagesGoWithThem) {
  const auto heap = SharedHeap::open();
  std::memset(heap->first_page(), 1, 100);
  const std::int64_t before = pages_of(*heap);
  auto first = heap->allocate(kMiB + 1);
  auto second = heap->allocate(3 * kMiB);
  std::memset(first.get(), 1, kMiB + 1);
  std::memset(second.get(), 2, 3 * kMiB);
  EXPECT_EQ(*heap->offset_of(second.get()) - *heap->offset_of(first.get()), kMiB + 4096);
  EXPECT_EQ(static_cast<char*>(first.get())[kMiB], 1);
  EXPECT_GE(pages_of(*heap), before + 4 * kMiB);
  const auto offset = heap->offset_of(first.get());
  first = {};
  EXPECT_LE(pages_of(*heap), before + 3 * kMiB);
  EXPECT_EQ(static_cast<char*>(second.get())[3 * kMiB - 1], 2);
  auto third = heap->allocate(kMiB);
  EXPECT_EQ(heap->offset_of(third.get()), offset);
  EXPECT_EQ(static_cast<char*>(third.get())[0], 0);  // fresh pages
  second = {};
  third = {};
  EXPECT_EQ(pages_of(*heap), before);
  EXPECT_TRUE(heap->allocate(heap->size() - 4096));  // All in one piece again.
  EXPECT_FALSE(heap->allocate(heap->size()));
}

TEST(SharedHeap, KnowsWhatLiesInIt) {
  const auto heap = SharedHeap::open();
  const auto block = heap->allocate(100);
  const int elsewhere = 0;
  EXPECT_EQ(heap->offset_of(static_cast<char*>(block.get()) + 7), *heap->offset_of(block.get()) + 7);
  EXPECT_FALSE(heap->offset_of(&elsewhere));
}

TEST(SharedHeap, AForkedChildHasACopy) {
  const auto heap = SharedHeap::open();
  auto block = heap->allocate(100);
  auto* const byte = static_cast<char*>(block.get());
  *byte = 1;
  const pid_t child = fork();
  if (child == 0) {
    bool ok = *byte == 1 && SharedHeap::opened() == nullptr && !heap->allocate(100) && !heap->offset_of(byte);
    *byte = 2;
    block = {};  // No pages of the parent go.
    ok = ok && SharedHeap::open() != heap && SharedHeap::open()->fd() != heap->fd();
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*byte, 1);
}

TEST(SharedHeap, ServesLargeBlocksOfTheEngineWhileItIsOpen) {
  const auto is_shared = [](std::int64_t bytes) {
    const auto block = allocate_shareable(c10::Device(c10::kCPU), bytes);
    const auto heap = SharedHeap::opened();
    return heap != nullptr && heap->offset_of(block.get()).has_value();
  };
  EXPECT_FALSE(is_shared(kMiB));
  const auto heap = SharedHeap::open();
  EXPECT_TRUE(is_shared(kMiB));
  EXPECT_FALSE(is_shared(1000));
}

}  // namespace shared_heap_test
}  // namespace fsdp::memory
