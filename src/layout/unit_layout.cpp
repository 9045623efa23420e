#include "layout/unit_layout.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <iterator>
#include <numeric>
#include <queue>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::layout {
namespace {

// Arithmetic on sizes (all are >= 0) that throws instead of wrapping around. A size that doesn't fit comes from a mistaken shape or
// block, or is a sum to which `parameter` adds most, so the error names it.
class CheckedArithmetic {
 public:
  CheckedArithmetic(const std::string& parameter, std::int64_t world_size) : parameter_(parameter), world_size_(world_size) {}

  std::int64_t add(std::int64_t a, std::int64_t b) const {
    std::int64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) fail();
    return sum;
  }
  std::int64_t multiply(std::int64_t a, std::int64_t b) const {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) fail();
    return product;
  }
  std::int64_t round_up(std::int64_t value, std::int64_t multiple) const {
    const std::int64_t remainder = value % multiple;
    return remainder == 0 ? value : add(value, multiple - remainder);
  }

 private:
  [[noreturn]] void fail() const {
    throw Error("parameter '" + parameter_ + "' makes its unit's buffer over " + std::to_string(world_size_) +
                " rank(s) larger than 2^63 - 1 bytes; correct its shape or block, or put it into another unit");
  }

  const std::string& parameter_;
  std::int64_t world_size_;
};

void validate(const ParameterTraits& parameter) {
  const std::string name = "parameter '" + parameter.name + "'";
  for (const std::int64_t size : parameter.shape) {
    if (size < 0) throw Error(name + " has a negative size in its shape " + in_brackets(parameter.shape) + "; give the shape of a tensor");
  }
  constexpr std::int64_t kItemsizes[] = {1, 2, 4, 8, 16};
  if (std::find(std::begin(kItemsizes), std::end(kItemsizes), parameter.itemsize) == std::end(kItemsizes)) {
    throw Error(name + " has elements of " + std::to_string(parameter.itemsize) +
                " bytes; give it a dtype whose elements have 1, 2, 4, 8 or 16 bytes");
  }
  if (parameter.granularity.kind == Granularity::Kind::kBlock && parameter.granularity.block < 1) {
    throw Error(name + " has blocks of " + std::to_string(parameter.granularity.block) +
                " elements; give Granularity::blocks at least 1, or use Granularity::element()");
  }
}

// The product of the sizes from `first_dim` on.
std::int64_t numel_of(const ParameterTraits& parameter, std::size_t first_dim, std::int64_t world_size) {
  const CheckedArithmetic checked(parameter.name, world_size);
  const auto begin = parameter.shape.begin() + static_cast<std::ptrdiff_t>(std::min(first_dim, parameter.shape.size()));
  // A 0 may follow sizes whose product doesn't fit.
  if (std::find(begin, parameter.shape.end(), 0) != parameter.shape.end()) return 0;
  return std::accumulate(begin, parameter.shape.end(), std::int64_t{1}, [&](auto a, auto b) { return checked.multiply(a, b); });
}

std::int64_t quantum_of(const ParameterTraits& parameter, std::int64_t world_size) {
  switch (parameter.granularity.kind) {
    case Granularity::Kind::kRows:
      return std::max<std::int64_t>(numel_of(parameter, 1, world_size), 1);
    case Granularity::Kind::kBlock:
      return parameter.granularity.block;
    case Granularity::Kind::kElement:
    case Granularity::Kind::kWhole:
      break;
  }
  return parameter.alignment > 0 ? parameter.alignment : kAlignment / parameter.itemsize;
}

// A sub-buffer in the making.
struct SubBufferDraft {
  SubBuffer buffer;
  std::vector<std::size_t> members;  // parameters, in their given order
};

bool fits(const SubBuffer& buffer, const ParameterTraits& parameter, std::int64_t quantum) {
  return buffer.dtype == parameter.dtype && buffer.itemsize == parameter.itemsize && buffer.trainable == parameter.trainable &&
         buffer.kind == parameter.granularity.kind && buffer.quantum == quantum;
}

// Parameters in order, each at a multiple of the quantum, cut into equal shards at multiples of the quantum. This is right for three
// granularities: elements (the quantum is then the alignment), blocks, and rows: whole rows leave no gap, and since every parameter of the
// group starts at a multiple of the row, a multiple of the row is between two rows of whichever parameter it falls into.
void place_end_to_end(SubBufferDraft& group, std::vector<ParameterPosition>& positions, const CheckedArithmetic& checked,
                      std::int64_t world_size) {
  const std::int64_t quantum = group.buffer.quantum;
  std::int64_t end = 0;
  for (const std::size_t member : group.members) {
    auto& position = positions[member];
    position.offset = checked.round_up(end, quantum);
    end = checked.add(position.offset, position.numel);
  }
  const std::int64_t even_share = end / world_size + (end % world_size != 0);
  group.buffer.shard_numel = checked.round_up(even_share, quantum);
}

// Whole parameters on ranks: longest processing time first, that is, the largest parameter that is left goes to the rank that has least.
// Ties go to the earlier parameter and the lower rank, so that all ranks compute the same.
void place_whole(SubBufferDraft& group, std::vector<ParameterPosition>& positions, const CheckedArithmetic& checked,
                 std::int64_t world_size) {
  std::vector<std::size_t> largest_first = group.members;
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](std::size_t a, std::size_t b) { return positions[a].numel > positions[b].numel; });

  using Bin = std::pair<std::int64_t, std::int64_t>;  // elements, rank
  std::priority_queue<Bin, std::vector<Bin>, std::greater<>> least_first;
  // At most n ranks get one of n parameters.
  const std::int64_t bins = std::min(world_size, static_cast<std::int64_t>(group.members.size()));
  for (std::int64_t rank = 0; rank < bins; ++rank) least_first.emplace(0, rank);

  std::int64_t largest_bin = 0;
  std::vector<std::pair<std::size_t, std::int64_t>> rank_of;  // kept, because the size of shards is known only at the end
  rank_of.reserve(largest_first.size());
  for (const std::size_t member : largest_first) {
    const auto [end, rank] = least_first.top();
    least_first.pop();
    positions[member].offset = end;
    rank_of.emplace_back(member, rank);
    const std::int64_t new_end = checked.round_up(checked.add(end, positions[member].numel), group.buffer.quantum);
    largest_bin = std::max(largest_bin, new_end);
    least_first.emplace(new_end, rank);
  }

  group.buffer.shard_numel = largest_bin;
  for (const auto& [member, rank] : rank_of) {
    positions[member].offset = checked.add(positions[member].offset, checked.multiply(rank, largest_bin));
  }
}

}  // namespace

UnitLayout::UnitLayout(std::vector<ParameterTraits> parameters, std::int64_t world_size)
    : parameters_(std::move(parameters)), world_size_(world_size), positions_(parameters_.size()) {
  if (world_size < 1) throw Error("a layout over " + std::to_string(world_size) + " ranks was asked for; at least one rank is needed");

  std::vector<SubBufferDraft> groups;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    validate(parameter);
    positions_[i].numel = numel_of(parameter, 0, world_size);
    const std::int64_t quantum = quantum_of(parameter, world_size);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const SubBufferDraft& g) { return fits(g.buffer, parameter, quantum); });
    if (group == groups.end()) {
      const SubBuffer buffer{.dtype = parameter.dtype,
                             .itemsize = parameter.itemsize,
                             .trainable = parameter.trainable,
                             .kind = parameter.granularity.kind,
                             .quantum = quantum};
      group = groups.insert(groups.end(), SubBufferDraft{buffer, {}});
    }
    group->members.push_back(i);
  }

  const auto first_frozen = std::stable_partition(groups.begin(), groups.end(), [](const SubBufferDraft& g) { return g.buffer.trainable; });
  trainable_sub_buffers_ = static_cast<std::size_t>(first_frozen - groups.begin());

  for (auto& group : groups) {
    auto& buffer = group.buffer;
    const std::size_t largest = *std::max_element(group.members.begin(), group.members.end(),
                                                  [&](std::size_t a, std::size_t b) { return positions_[a].numel < positions_[b].numel; });
    const CheckedArithmetic checked(parameters_[largest].name, world_size);
    if (buffer.kind == Granularity::Kind::kWhole) {
      place_whole(group, positions_, checked, world_size);
    } else {
      place_end_to_end(group, positions_, checked, world_size);
    }
    for (const std::size_t member : group.members) {
      positions_[member].sub_buffer = sub_buffers_.size();
      buffer.payload_numel += positions_[member].numel;
    }
    buffer.byte_offset = full_bytes_;
    buffer.shard_byte_offset = shard_bytes_;
    const std::int64_t shard_bytes = checked.multiply(buffer.shard_numel, buffer.itemsize);
    const std::int64_t bytes = checked.multiply(shard_bytes, world_size);
    full_bytes_ = checked.round_up(checked.add(full_bytes_, bytes), kAlignment);
    shard_bytes_ = checked.round_up(checked.add(shard_bytes_, shard_bytes), kAlignment);
    if (buffer.trainable) {
      trainable_bytes_ = full_bytes_;
      trainable_shard_bytes_ = shard_bytes_;
    }
    sub_buffers_.push_back(buffer);
  }
}

std::int64_t UnitLayout::padding_bytes() const {
  std::int64_t padding = full_bytes_;
  for (const auto& buffer : sub_buffers_) padding -= buffer.payload_numel * buffer.itemsize;
  return padding;
}

LocalSlice UnitLayout::local_slice(std::size_t parameter, std::int64_t first_rank, std::int64_t ranks) const {
  assert(parameter < positions_.size() && first_rank >= 0 && first_rank + ranks <= world_size_);
  const auto& position = positions_[parameter];
  const std::int64_t shard_numel = sub_buffers_[position.sub_buffer].shard_numel;
  const std::int64_t shard_begin = first_rank * shard_numel;
  const std::int64_t begin = std::max(position.offset, shard_begin);
  const std::int64_t end = std::min(position.offset + position.numel, shard_begin + ranks * shard_numel);
  if (begin >= end) return {};
  return {.parameter_offset = begin - position.offset, .shard_offset = begin - shard_begin, .numel = end - begin};
}

}  // namespace fsdp::layout
