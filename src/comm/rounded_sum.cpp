#include "comm/rounded_sum.h"

#include <algorithm>
#include <vector>

#include "base/parallel_for.h"
#include "base/rounded_blocks.h"
#include "comm/call.h"

namespace fsdp::comm {
namespace {

/// The size of an array of floats that stays in the caches.
constexpr std::int64_t kCachedElements = 8192;

/// Calls fn(first element, number of elements, array) for ranges of complete blocks, on several threads. The array has room for so many
/// elements `arrays` times.
template <typename Fn>
void for_ranges(const GradCommFormat& format, std::int64_t numel, std::size_t arrays, const Fn& fn) {
  constexpr std::int64_t kRangesPerThread = 4;
  const std::int64_t range = std::max<std::int64_t>(kCachedElements / format.block, 1) * format.block;
  parallel_for((numel + range - 1) / range, kRangesPerThread, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> memory(arrays * static_cast<std::size_t>(range));
    for (std::int64_t number = first; number < last; ++number) {
      fn(number * range, std::min(range, numel - number * range), std::span(memory));
    }
  });
}

const void* element(const void* data, std::int64_t index, at::ScalarType dtype) {
  return static_cast<const char*>(data) + index * static_cast<std::int64_t>(elementSize(dtype));
}

}  // namespace

std::int64_t contribution_bytes(const ReducePart& part) {
  if (part.encoding) return encoded_bytes(part.encoding->format, part.out.numel());
  return part.out.numel() * static_cast<std::int64_t>(part.unreduced.itemsize());
}

void encode_contribution(const ReducePart& part, std::span<const void* const> sources, int sender, int receiver, void* encoded) {
  const Encoding& encoding = *part.encoding;
  const GradCommFormat& format = encoding.format;
  const at::Tensor& lost = encoding.lost;
  const std::int64_t numel = part.out.numel();
  const auto dtype = part.unreduced.scalar_type();
  std::uint64_t own_key = mix(encoding.key, encoding.reduction_number);
  for (const int rank : {sender, receiver}) own_key = mix(own_key, static_cast<std::uint64_t>(rank));
  float* const kept = lost.defined() ? lost.mutable_data_ptr<float>() + (receiver < sender ? receiver : receiver - 1) * numel : nullptr;
  for_ranges(format, numel, 1, [&](std::int64_t begin, std::int64_t count, std::span<float> memory) {
    std::vector<const void*> in_range;
    for (const void* source : sources) in_range.push_back(source == nullptr ? nullptr : element(source, begin, dtype));
    rank_order_sum(in_range, dtype, memory.data(), at::kFloat, count, {});
    encode_blocks(format, memory.data(), count, own_key, begin / format.block, kept == nullptr ? nullptr : kept + begin,
                  static_cast<std::uint8_t*>(encoded) + encoded_bytes(format, begin));
  });
}

void sum_contributions(const ReducePart& part, std::span<const Contribution> contributions, at::ScalarType exact, const SumEnd& end) {
  const GradCommFormat& format = part.encoding->format;
  const auto out_dtype = part.out.scalar_type();
  auto* const out = static_cast<char*>(part.out.mutable_data_ptr());
  for_ranges(format, part.out.numel(), contributions.size(), [&](std::int64_t begin, std::int64_t count, std::span<float> memory) {
    std::vector<const void*> sources;
    for (const auto& [data, is_encoded] : contributions) {
      float* const values = memory.data() + sources.size() * (memory.size() / contributions.size());
      if (data == nullptr) {
        sources.push_back(nullptr);
        continue;
      }
      sources.push_back(values);
      if (is_encoded) {
        decode_blocks(format, static_cast<const std::uint8_t*>(data) + encoded_bytes(format, begin), count, values);
      } else {
        const void* const in_range = element(data, begin, exact);
        rank_order_sum({&in_range, 1}, exact, values, at::kFloat, count, {});
      }
    }
    rank_order_sum(sources, at::kFloat, out + begin * static_cast<std::int64_t>(elementSize(out_dtype)), out_dtype, count, end);
  });
}

}  // namespace fsdp::comm
