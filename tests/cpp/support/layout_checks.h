#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "layout/unit_layout.h"

// A second, slow layout, and check(), which compares a UnitLayout with it and counts what each rank owns element by element.
namespace fsdp::layout {

using Kind = Granularity::Kind;
using Shape = std::vector<std::int64_t>;

struct Dtype {
  std::int32_t key;
  std::int64_t itemsize;
};
inline constexpr Dtype kInt8{1, 1};
inline constexpr Dtype kBFloat16{15, 2};
inline constexpr Dtype kFloat{6, 4};
inline constexpr Dtype kDtypes[] = {kInt8, kBFloat16, kFloat, {7, 8}, {10, 16}};

inline ParameterTraits spec(std::string name, Shape shape, Granularity granularity = {}, Dtype dtype = kFloat, bool trainable = true) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .dtype = dtype.key,
          .itemsize = dtype.itemsize,
          .trainable = trainable,
          .granularity = granularity};
}

inline std::int64_t product(const Shape& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

inline std::int64_t payload_bytes(const std::vector<ParameterTraits>& parameters) {
  std::int64_t bytes = 0;
  for (const auto& parameter : parameters) bytes += product(parameter.shape) * parameter.itemsize;
  return bytes;
}

inline std::string describe(const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  static const char* const kKinds[] = {"element", "rows", "block", "whole"};
  std::ostringstream text;
  text << world_size << " ranks";
  for (const auto& parameter : parameters) {
    text << "\n  " << parameter.name << " [";
    for (const auto size : parameter.shape) text << ' ' << size;
    text << " ] of " << parameter.itemsize << " bytes, " << kKinds[static_cast<std::size_t>(parameter.granularity.kind)] << ' '
         << parameter.granularity.block << (parameter.trainable ? "" : ", frozen");
  }
  return text.str();
}

// The rules of the layout, followed in the plainest way: one element, one rank, one candidate at a time.
namespace reference {

inline std::int64_t next_multiple(std::int64_t value, std::int64_t of) {
  while (value % of != 0) ++value;
  return value;
}

inline std::int64_t quantum(const ParameterTraits& parameter) {
  if (parameter.granularity.kind == Kind::kBlock) return parameter.granularity.block;
  if (parameter.granularity.kind != Kind::kRows) return 64 / parameter.itemsize;
  if (parameter.shape.size() < 2) return 1;
  const std::int64_t row = product(Shape(parameter.shape.begin() + 1, parameter.shape.end()));
  return row == 0 ? 1 : row;
}

inline bool together(const ParameterTraits& a, const ParameterTraits& b) {
  return a.dtype == b.dtype && a.trainable == b.trainable && a.granularity.kind == b.granularity.kind && quantum(a) == quantum(b);
}

struct Buffer {
  std::vector<std::size_t> members;
  std::vector<std::int64_t> offsets;  // of the members
  std::int64_t shard_numel = 0;
};

inline std::vector<Buffer> group(const std::vector<ParameterTraits>& parameters) {
  std::vector<Buffer> buffers;
  for (const bool trainable : {true, false}) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].trainable != trainable) continue;
      std::size_t k = 0;
      while (k < buffers.size() && !together(parameters[buffers[k].members[0]], parameters[i])) ++k;
      if (k == buffers.size()) buffers.emplace_back();
      buffers[k].members.push_back(i);
    }
  }
  return buffers;
}

inline void place_in_order(Buffer& buffer, const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  const std::int64_t unit = quantum(parameters[buffer.members[0]]);
  std::int64_t end = 0;
  for (const auto member : buffer.members) {
    buffer.offsets.push_back(next_multiple(end, unit));
    end = buffer.offsets.back() + product(parameters[member].shape);
  }
  while (buffer.shard_numel * world_size < end) buffer.shard_numel += unit;
}

inline void place_whole(Buffer& buffer, const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  const std::int64_t unit = quantum(parameters[buffer.members[0]]);
  std::vector<std::int64_t> load(static_cast<std::size_t>(world_size), 0);
  std::vector<bool> placed(buffer.members.size(), false);
  std::vector<std::int64_t> rank(buffer.members.size(), 0);
  buffer.offsets.resize(buffer.members.size());
  for (std::size_t round = 0; round < buffer.members.size(); ++round) {
    std::size_t largest = buffer.members.size();
    for (std::size_t m = 0; m < buffer.members.size(); ++m) {
      if (placed[m]) continue;
      if (largest == buffer.members.size() ||
          product(parameters[buffer.members[m]].shape) > product(parameters[buffer.members[largest]].shape)) {
        largest = m;
      }
    }
    const auto emptiest = std::min_element(load.begin(), load.end());
    placed[largest] = true;
    rank[largest] = emptiest - load.begin();
    buffer.offsets[largest] = *emptiest;
    *emptiest = next_multiple(*emptiest + product(parameters[buffer.members[largest]].shape), unit);
  }
  buffer.shard_numel = *std::max_element(load.begin(), load.end());
  for (std::size_t m = 0; m < buffer.members.size(); ++m) buffer.offsets[m] += rank[m] * buffer.shard_numel;
}

inline std::vector<Buffer> layout(const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  auto buffers = group(parameters);
  for (auto& buffer : buffers) {
    if (parameters[buffer.members[0]].granularity.kind == Kind::kWhole) {
      place_whole(buffer, parameters, world_size);
    } else {
      place_in_order(buffer, parameters, world_size);
    }
  }
  return buffers;
}

}  // namespace reference

// Bytes of padding inside a sub-buffer, at most. In elements, with quantum q, W ranks, and parameters of n_i elements:
//   In order: parameters end at E <= sum n_i + gaps, and the shard is the smallest multiple of q that is >= E / W, so less than E / W + q.
//   Hence padding < gaps + W q. A gap is at most q - 1 and follows a parameter; between rows there is none.
//   Whole: let a_i be n_i rounded up to q. When the bin that ends up largest got its last parameter j, it was the emptiest, so it held at
//   most (sum a_i - a_j) / W. Hence W * shard <= sum a_i + (W - 1) max a_i, and padding is that less sum n_i.
inline std::int64_t padding_bound(const SubBuffer& buffer, const std::vector<std::int64_t>& numels, std::int64_t world_size) {
  const std::int64_t q = buffer.quantum;
  std::int64_t not_empty = 0, largest = 0, rounding = 0;
  for (const auto numel : numels) {
    const std::int64_t rounded = reference::next_multiple(numel, q);
    not_empty += numel > 0;
    largest = std::max(largest, rounded);
    rounding += rounded - numel;
  }
  if (not_empty == 0) return 0;
  switch (buffer.kind) {
    case Kind::kRows:
      return (world_size * q - 1) * buffer.itemsize;
    case Kind::kElement:
    case Kind::kBlock:
      return (not_empty * (q - 1) + world_size * q - 1) * buffer.itemsize;
    case Kind::kWhole:
      return (rounding + (world_size - 1) * largest) * buffer.itemsize;
  }
  return 0;
}

// What one element of a rank's shard holds.
struct Cell {
  std::size_t parameter = 0;
  std::int64_t element = -1;  // -1: padding
};

// Marks every element of one sub-buffer's parameters at the place that local_slice gives, and checks that each is owned once, at the
// place that positions() gives, with cuts where the granularity allows them. `padding` becomes the number of cells that nobody owns.
inline void check_ownership(const UnitLayout& layout, std::size_t sub_buffer, std::int64_t& padding) {
  const auto& buffer = layout.sub_buffers()[sub_buffer];
  const auto world_size = layout.world_size();
  std::vector<std::vector<Cell>> shards(static_cast<std::size_t>(world_size),
                                        std::vector<Cell>(static_cast<std::size_t>(buffer.shard_numel)));
  padding = world_size * buffer.shard_numel;
  for (std::size_t p = 0; p < layout.parameters().size(); ++p) {
    const auto& position = layout.positions()[p];
    if (position.sub_buffer != sub_buffer) continue;
    const auto& parameter = layout.parameters()[p];
    std::vector<std::int64_t> owner(static_cast<std::size_t>(position.numel), -1);
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      const auto slice = layout.local_slice(p, rank);
      if (slice.numel == 0) {
        ASSERT_EQ(slice, LocalSlice{}) << parameter.name << " on rank " << rank;
        continue;
      }
      ASSERT_GT(slice.numel, 0);
      ASSERT_GE(slice.parameter_offset, 0);
      ASSERT_GE(slice.shard_offset, 0);
      ASSERT_LE(slice.parameter_offset + slice.numel, position.numel) << parameter.name << " on rank " << rank;
      ASSERT_LE(slice.shard_offset + slice.numel, buffer.shard_numel) << parameter.name << " on rank " << rank;
      ASSERT_EQ(position.offset + slice.parameter_offset, rank * buffer.shard_numel + slice.shard_offset) << parameter.name;
      for (std::int64_t i = 0; i < slice.numel; ++i) {
        const std::int64_t element = slice.parameter_offset + i;
        Cell& cell = shards[static_cast<std::size_t>(rank)][static_cast<std::size_t>(slice.shard_offset + i)];
        auto& element_owner = owner[static_cast<std::size_t>(element)];
        if (element_owner != -1) FAIL() << parameter.name << "[" << element << "] is owned by ranks " << element_owner << " and " << rank;
        if (cell.element != -1) {
          FAIL() << parameter.name << " and " << layout.parameters()[cell.parameter].name << " overlap on rank " << rank;
        }
        element_owner = rank;
        cell = {p, element};
        --padding;
      }
    }
    for (std::int64_t element = 0; element < position.numel; ++element) {
      if (owner[static_cast<std::size_t>(element)] == -1) FAIL() << parameter.name << "[" << element << "] is owned by no rank";
      if (element == 0 || owner[static_cast<std::size_t>(element)] == owner[static_cast<std::size_t>(element - 1)]) continue;
      if (buffer.kind == Kind::kRows && element % reference::quantum(parameter) != 0) FAIL() << "a row of " << parameter.name << " is cut";
      if (buffer.kind == Kind::kBlock && element % parameter.granularity.block != 0) FAIL() << "a block of " << parameter.name << " is cut";
      ASSERT_NE(buffer.kind, Kind::kWhole) << parameter.name << " is cut";
    }
  }
}

// The whole layout against the reference and against the promises of the header.
inline void check(const std::vector<ParameterTraits>& parameters, std::int64_t world_size) {
  const UnitLayout layout(parameters, world_size);
  const auto expected = reference::layout(parameters, world_size);
  ASSERT_EQ(layout.world_size(), world_size);
  ASSERT_EQ(layout.parameters().size(), parameters.size());
  ASSERT_EQ(layout.positions().size(), parameters.size());
  ASSERT_EQ(layout.sub_buffers().size(), expected.size());

  std::int64_t full_bytes = 0, shard_bytes = 0, trainable_bytes = 0, trainable_shard_bytes = 0, padding_bytes = 0;
  std::size_t trainable = 0;
  for (std::size_t k = 0; k < expected.size(); ++k) {
    SCOPED_TRACE("sub-buffer " + std::to_string(k));
    const auto& buffer = layout.sub_buffers()[k];
    const auto& first = parameters[expected[k].members[0]];
    EXPECT_EQ(buffer.dtype, first.dtype);
    EXPECT_EQ(buffer.itemsize, first.itemsize);
    EXPECT_EQ(buffer.trainable, first.trainable);
    EXPECT_EQ(buffer.kind, first.granularity.kind);
    EXPECT_EQ(buffer.quantum, reference::quantum(first));
    EXPECT_EQ(buffer.shard_numel, expected[k].shard_numel);
    EXPECT_EQ(buffer.shard_numel % buffer.quantum, 0);

    std::vector<std::int64_t> numels;
    for (std::size_t m = 0; m < expected[k].members.size(); ++m) {
      const auto p = expected[k].members[m];
      const auto& position = layout.positions()[p];
      numels.push_back(product(parameters[p].shape));
      ASSERT_EQ(position.sub_buffer, k) << parameters[p].name;
      ASSERT_EQ(position.offset, expected[k].offsets[m]) << parameters[p].name;
      ASSERT_EQ(position.numel, numels.back()) << parameters[p].name;
      ASSERT_LE(position.offset + position.numel, world_size * buffer.shard_numel) << parameters[p].name;
      if (buffer.kind == Kind::kElement || buffer.kind == Kind::kWhole) {
        ASSERT_EQ(position.offset * buffer.itemsize % kAlignment, 0) << parameters[p].name;
      }
    }
    EXPECT_EQ(buffer.payload_numel, std::accumulate(numels.begin(), numels.end(), std::int64_t{0}));

    std::int64_t padding = 0;
    ASSERT_NO_FATAL_FAILURE(check_ownership(layout, k, padding));
    EXPECT_EQ(padding, world_size * buffer.shard_numel - buffer.payload_numel);
    EXPECT_LE(padding * buffer.itemsize, padding_bound(buffer, numels, world_size));

    // Sub-buffers follow one another, each at the next multiple of the alignment.
    EXPECT_EQ(buffer.byte_offset, full_bytes);
    EXPECT_EQ(buffer.shard_byte_offset, shard_bytes);
    const std::int64_t end = full_bytes + world_size * buffer.shard_numel * buffer.itemsize;
    full_bytes = reference::next_multiple(end, kAlignment);
    shard_bytes = reference::next_multiple(shard_bytes + buffer.shard_numel * buffer.itemsize, kAlignment);
    padding_bytes += padding * buffer.itemsize + full_bytes - end;
    if (!buffer.trainable) continue;
    EXPECT_EQ(trainable, k) << "a trainable sub-buffer follows a frozen one";
    ++trainable;
    trainable_bytes = full_bytes;
    trainable_shard_bytes = shard_bytes;
  }
  EXPECT_EQ(layout.trainable_sub_buffers(), trainable);
  EXPECT_EQ(layout.full_bytes(), full_bytes);
  EXPECT_EQ(layout.shard_bytes(), shard_bytes);
  EXPECT_EQ(layout.trainable_bytes(), trainable_bytes);
  EXPECT_EQ(layout.trainable_shard_bytes(), trainable_shard_bytes);
  EXPECT_EQ(layout.padding_bytes(), padding_bytes);
  EXPECT_EQ(layout.padding_bytes(), layout.full_bytes() - payload_bytes(parameters));
}

}  // namespace fsdp::layout
