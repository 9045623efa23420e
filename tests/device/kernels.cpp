#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/block_format.h"
#include "base/rounded_arithmetic.h"
#include "comm/device_sums.h"
#include "graph.h"
#include "memory.h"
#include "optim/device_adamw.h"
#include "streams.h"

// libfsdp's own kernels: each is one, and does what its threads would do on a GPU.
namespace sim {
namespace {

/// So many threads, whatever there is to do: some have more than one element, or none.
constexpr int kThreads = 3;

template <typename T>
T* pointer_behind(T* address) {
  return address == nullptr ? nullptr : static_cast<T*>(behind(address));
}

void add_range(std::vector<Range>& ranges, const void* address, std::int64_t bytes, bool write) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (bytes > 0) ranges.push_back({.begin = begin, .end = begin + static_cast<std::uintptr_t>(bytes), .write = write});
}

/// And at each replay, where the stream is captured.
template <typename Kernel>
void run(c10::Stream stream, const Kernel& kernel) {
  kernel();
  record_in_graph(stream, kernel);
}

template <typename Source, typename Out>
void sum(fsdp::comm::DeviceSum given, c10::Stream stream) {
  std::vector<Range> ranges;
  for (int number = 0; number < given.count; ++number) {
    auto& part = given.parts[number];
    const auto bytes = part.numel * static_cast<std::int64_t>(sizeof(Out));
    for (int k = 0; k < part.count; ++k) {
      add_range(ranges, fsdp::comm::piece_of<Source>(part, k), part.numel * static_cast<std::int64_t>(sizeof(Source)), /*write=*/false);
    }
    if (given.accumulate) add_range(ranges, part.out, bytes, /*write=*/false);
    add_range(ranges, part.out, bytes, /*write=*/true);
    part.first = pointer_behind(part.first);
    part.apart_piece = pointer_behind(part.apart_piece);
    part.out = pointer_behind(part.out);
  }
  launch(stream, "fsdp::sum", ranges);
  run(stream, [given] {
    for (int number = 0; number < given.count; ++number) {
      for (int thread = 0; thread < kThreads; ++thread) fsdp::comm::sum_part<Source, Out>(given, number, thread, kThreads);
    }
  });
}

void launch_sum(const fsdp::comm::DeviceSum& given, const c10::Stream& stream) {
  fsdp::with_real_type(given.source, [&](auto source) {
    fsdp::with_real_type(given.out, [&](auto out) { sum<decltype(source), decltype(out)>(given, stream); });
  });
}

template <bool kEncodes>
void launch_conversion(const fsdp::BlockedPieces& given, const c10::Stream& stream) {
  const auto value_bytes = given.pieces * given.numel * static_cast<std::int64_t>(c10::elementSize(given.dtype));
  std::vector<Range> ranges;
  add_range(ranges, given.values, value_bytes, /*write=*/!kEncodes);
  add_range(ranges, given.encoded, given.pieces * given.encoded_bytes(), /*write=*/kEncodes);
  launch(stream, kEncodes ? "fsdp::encode" : "fsdp::decode", ranges);
  auto here = given;
  here.values = pointer_behind(given.values);
  here.encoded = pointer_behind(given.encoded);
  fsdp::with_real_type(given.dtype, [&](auto type) {
    using T = decltype(type);
    run(stream, [here] {
      for (int thread = 0; thread < kThreads; ++thread) {
        kEncodes ? fsdp::encode_blocks<T>(here, thread, kThreads) : fsdp::decode_blocks<T>(here, thread, kThreads);
      }
    });
  });
}

/// The threads of a team, each of which does its part of a loop before the next one does, the last one first.
struct Team {
  static constexpr std::int64_t kLanes = 5;

  template <typename Fn>
  void for_each(std::int64_t count, const Fn& fn) const {
    for (std::int64_t lane = kLanes - 1; lane >= 0; --lane) {
      for (std::int64_t i = lane; i < count; i += kLanes) fn(i);
    }
  }
  std::uint32_t largest(const float* values, std::int64_t count) const { return fsdp::largest_magnitude(values, count); }
  void transform(float* values, std::int64_t count) const { fsdp::transform_in_pairs(*this, values, count); }
};

template <bool kEncodes>
void launch_rounding(const fsdp::DeviceRounding& given, const c10::Stream& stream) {
  std::vector<Range> ranges;
  auto here = given;
  for (int number = 0; number < given.count; ++number) {
    auto& part = here.parts[number];
    const auto value_bytes = fsdp::padded_numel(given.format, part.numel) * static_cast<std::int64_t>(sizeof(float));
    const auto lost_bytes = part.numel * static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t row = 0; row < part.rows; ++row) {
      const auto* const values = part.values + (row < part.own ? row : row + 1) * part.value_stride;
      const auto* const lost = part.lost + row * part.lost_stride;
      if (kEncodes) add_range(ranges, values, lost_bytes, /*write=*/false);
      add_range(ranges, values, value_bytes, /*write=*/true);
      for (const bool write : {false, true}) add_range(ranges, lost, part.lost == nullptr ? 0 : lost_bytes, write);
      add_range(ranges, part.encoded + row * part.encoded_stride, fsdp::encoded_bytes(given.format, part.numel), /*write=*/kEncodes);
    }
    if (kEncodes) add_range(ranges, part.reduction_number, part.reduction_number == nullptr ? 0 : sizeof(std::int64_t), /*write=*/false);
    part.reduction_number = pointer_behind(part.reduction_number);
    part.values = pointer_behind(part.values);
    part.encoded = pointer_behind(part.encoded);
    part.lost = pointer_behind(part.lost);
  }
  launch(stream, kEncodes ? "fsdp::round" : "fsdp::unround", ranges);
  run(stream, [here] {
    for (int number = 0; number < here.count; ++number) {
      for (int team = 0; team < kThreads; ++team) {
        fsdp::convert_part<kEncodes>(Team{}, here.format, here.parts[number], team, kThreads);
      }
    }
  });
}

template <typename Value, typename Gradient>
void step_adamw_8bit(const fsdp::optim::DeviceAdamW8bit& step) {
  using fsdp::optim::kBlock;
  std::array<fsdp::optim::AdamWElement, kBlock> updated;
  for (std::int64_t begin = 0; begin < step.numel; begin += kBlock) {
    const auto count = static_cast<std::size_t>(std::min(kBlock, step.numel - begin));
    const auto at = [&](std::size_t i) { return begin + static_cast<std::int64_t>(i); };
    std::int32_t first = 0;
    std::int32_t second = 0;
    for (std::size_t i = 0; i < count; ++i) {
      updated[i] = fsdp::optim::update_at<Value, Gradient>(step, at(i));
      first = std::max(first, fsdp::optim::magnitude_bits(updated[i].first));
      second = std::max(second, fsdp::optim::magnitude_bits(updated[i].second));
    }
    for (std::size_t i = 0; i < count; ++i) {
      fsdp::optim::encode_at(step.first, at(i), updated[i].first, std::bit_cast<float>(first));
      fsdp::optim::encode_at(step.second, at(i), updated[i].second, std::bit_cast<float>(second));
    }
  }
}

void launch_adamw_8bit(const fsdp::optim::DeviceAdamW8bit& given, const c10::Stream& stream) {
  const auto blocks = (given.numel + fsdp::optim::kBlock - 1) / fsdp::optim::kBlock;
  std::vector<Range> ranges;
  add_range(ranges, given.gradients, given.numel * static_cast<std::int64_t>(c10::elementSize(given.gradient_dtype)), /*write=*/false);
  add_range(ranges, given.first.map, 2 * sizeof(fsdp::optim::DynamicMap), /*write=*/false);
  for (const bool write : {false, true}) {
    add_range(ranges, given.values, given.numel * static_cast<std::int64_t>(c10::elementSize(given.dtype)), write);
    for (const auto& moment : {given.first, given.second}) {
      add_range(ranges, moment.codes, given.numel, write);
      add_range(ranges, moment.largest, blocks * static_cast<std::int64_t>(sizeof(float)), write);
    }
  }
  launch(stream, "fsdp::adamw_8bit", ranges);
  auto here = given;
  here.values = pointer_behind(given.values);
  here.gradients = pointer_behind(given.gradients);
  for (auto* const moment : {&here.first, &here.second}) {
    *moment = {.map = pointer_behind(moment->map), .codes = pointer_behind(moment->codes), .largest = pointer_behind(moment->largest)};
  }
  fsdp::with_real_type(given.dtype, [&](auto value) {
    fsdp::with_real_type(given.gradient_dtype,
                         [&](auto gradient) { run(stream, [here] { step_adamw_8bit<decltype(value), decltype(gradient)>(here); }); });
  });
}

[[maybe_unused]] const bool kRegistered = [] {
  fsdp::comm::device_sums().set(kType, &launch_sum);
  fsdp::device_encoders().set(kType, &launch_conversion<true>);
  fsdp::device_decoders().set(kType, &launch_conversion<false>);
  fsdp::device_rounders().set(kType, &launch_rounding<true>);
  fsdp::device_unrounders().set(kType, &launch_rounding<false>);
  fsdp::optim::device_adamw_8bit().set(kType, &launch_adamw_8bit);
  return true;
}();

}  // namespace
}  // namespace sim
