#include "checkpoint/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace boxes_test {

/// The positions of a box's elements in the whole tensor's row-major order, in the box's own.
std::vector<std::int64_t> elements(const Box& box, const Shape& shape) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < numel(box.sizes); ++i) {
    std::int64_t rest = i;
    std::int64_t at = 0;
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      at += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
      stride *= shape[d];
    }
    result.push_back(at);
  }
  return result;
}

/// The least number of boxes that follow one another, by trying at every element the longest box that begins there.
std::size_t fewest_boxes(const Shape& shape, std::int64_t offset, std::int64_t length) {
  // A contiguous box is single indices, then a range, then whole dimensions; so taking the longest one first is never worse.
  std::size_t count = 0;
  while (length > 0) {
    std::int64_t longest = 1;
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (offset % stride != 0) break;
      const std::int64_t rows = std::min(shape[d] - offset / stride % shape[d], length / stride);
      longest = std::max(longest, rows * stride);
      stride *= shape[d];
    }
    offset += longest;
    length -= longest;
    ++count;
  }
  return count;
}

const std::vector<Shape> kShapes = {{},     {1},    {7},       {0},       {3, 4},    {4, 1},       {1, 5},
                                    {0, 3}, {3, 0}, {2, 3, 4}, {3, 1, 4}, {1, 1, 1}, {2, 2, 2, 3}, {1, 3, 1, 2, 2}};

TEST(Boxes, CoverASliceInOrderAndAreFew) {
  for (const Shape& shape : kShapes) {
    const std::int64_t all = numel(shape);
    for (std::int64_t offset = 0; offset <= all; ++offset) {
      for (std::int64_t length = 0; offset + length <= all; ++length) {
        const std::vector<Box> boxes = boxes_of_slice(shape, offset, length);
        std::vector<std::int64_t> covered;
        for (const Box& box : boxes) {
          check_within(box, shape);
          const std::vector<std::int64_t> some = elements(box, shape);
          covered.insert(covered.end(), some.begin(), some.end());
        }
        std::vector<std::int64_t> expected(static_cast<std::size_t>(length));
        std::iota(expected.begin(), expected.end(), offset);
        ASSERT_EQ(covered, expected);
        ASSERT_EQ(boxes.size(), fewest_boxes(shape, offset, length));
      }
    }
  }
}

TEST(Boxes, OfAMatrixArePartOfARowWholeRowsPartOfARow) {
  const std::vector<Box> expected = {{{0, 3}, {1, 1}}, {{1, 0}, {2, 4}}, {{3, 0}, {1, 2}}};
  EXPECT_EQ(boxes_of_slice(Shape{5, 4}, 3, 11), expected);
}

std::vector<Box> all_boxes(const Shape& shape) {
  std::vector<Box> boxes = {{}};
  for (const std::int64_t size : shape) {
    std::vector<Box> longer;
    for (const Box& box : boxes) {
      for (std::int64_t offset = 0; offset < size; ++offset) {
        for (std::int64_t count = 1; offset + count <= size; ++count) {
          longer.push_back(box);
          longer.back().offsets.push_back(offset);
          longer.back().sizes.push_back(count);
        }
      }
    }
    boxes = longer;
  }
  return boxes;
}

/// The runs that copy what both lists hold, by looking at every element.
std::vector<Run> brute_force_runs(const std::vector<std::int64_t>& source, const std::vector<std::int64_t>& destination) {
  std::vector<Run> runs;
  for (std::size_t to = 0; to < destination.size(); ++to) {
    for (std::size_t from = 0; from < source.size(); ++from) {
      if (source[from] != destination[to]) continue;
      const auto s = static_cast<std::int64_t>(from);
      const auto d = static_cast<std::int64_t>(to);
      if (!runs.empty() && runs.back().source + runs.back().length == s && runs.back().destination + runs.back().length == d) {
        ++runs.back().length;
      } else {
        runs.push_back({s, d, 1});
      }
    }
  }
  return runs;
}

TEST(Runs, AreTheFewestBetweenBoxes) {
  for (const Shape& shape : {Shape{}, Shape{5}, Shape{3, 3}, Shape{1, 4}, Shape{2, 2, 3}, Shape{2, 1, 3}}) {
    const std::vector<Box> boxes = all_boxes(shape);
    for (const Box& source : boxes) {
      const std::vector<std::int64_t> from = elements(source, shape);
      for (const Box& destination : boxes) {
        ASSERT_EQ(runs_to_box(source, destination), brute_force_runs(from, elements(destination, shape)));
      }
    }
  }
}

TEST(Runs, AreTheFewestIntoASlice) {
  for (const Shape& shape : {Shape{}, Shape{6}, Shape{3, 4}, Shape{2, 3, 2}}) {
    const std::int64_t all = numel(shape);
    for (const Box& source : all_boxes(shape)) {
      const std::vector<std::int64_t> from = elements(source, shape);
      for (std::int64_t offset = 0; offset <= all; ++offset) {
        for (std::int64_t length = 0; offset + length <= all; ++length) {
          std::vector<std::int64_t> slice(static_cast<std::size_t>(length));
          std::iota(slice.begin(), slice.end(), offset);
          ASSERT_EQ(runs_to_slice(source, boxes_of_slice(shape, offset, length)), brute_force_runs(from, slice));
        }
      }
    }
  }
}

TEST(Runs, IntoASliceOfABoxAreThoseIntoIt) {
  const Shape shape = {3, 4, 2};
  const std::vector<Box> boxes = all_boxes(shape);
  for (const Box& box : boxes) {
    const std::vector<std::int64_t> to = elements(box, shape);
    const std::int64_t all = numel(box.sizes);
    for (const std::int64_t offset : {std::int64_t{0}, all / 3, all - 1}) {
      for (const std::int64_t length : {std::int64_t{0}, (all - offset) / 2, all - offset}) {
        const std::vector<Box> slice = boxes_of_slice(box, offset, length);
        const std::vector<std::int64_t> wanted(to.begin() + offset, to.begin() + offset + length);
        for (std::size_t i = 0; i < boxes.size(); i += 7) {
          ASSERT_EQ(runs_to_slice(boxes[i], slice), brute_force_runs(elements(boxes[i], shape), wanted));
        }
      }
    }
  }
}

TEST(Runs, OfWholeTensorsAreOne) {
  const Shape shape = {1 << 20, 3, 1 << 10};
  const std::vector<ckpt::Run> one = {{0, 0, numel(shape)}};
  EXPECT_EQ(runs_to_box(whole(shape), whole(shape)), one);
  EXPECT_EQ(runs_to_slice(whole(shape), boxes_of_slice(shape, 0, numel(shape))), one);
  EXPECT_EQ(runs_to_slice(whole(shape), boxes_of_slice(shape, 5, 1 << 30)), (std::vector<ckpt::Run>{{5, 0, 1 << 30}}));
}

TEST(Boxes, ADifferenceHasEachOtherElementOnce) {
  const Shape shape = {3, 4, 3};
  std::vector<Box> all;  // boxes of the tensor
  for (std::int64_t i = 0; i < 3 * 4 * 3; ++i) {
    const Box box{{i / 12, i / 3 % 4, i % 3}, {3 - i / 12, 1 + i % (4 - i / 3 % 4), 1}};
    all.push_back(box);
    all.push_back({box.offsets, {1, 4 - box.offsets[1], 3 - box.offsets[2]}});
  }
  all.push_back(whole(shape));
  for (const auto& a : all) {
    for (const auto& b : all) {
      std::vector<Box> boxes;
      append_difference(a, b, boxes);
      std::vector<std::int64_t> found;
      for (const auto& box : boxes) std::ranges::copy(elements(box, shape), std::back_inserter(found));
      std::ranges::sort(found);
      std::vector<std::int64_t> expected;
      std::ranges::set_difference(elements(a, shape), elements(b, shape), std::back_inserter(expected));
      EXPECT_EQ(found, expected);
    }
  }
}

TEST(Boxes, WhatDoesNotFitIsAnError) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(numel(Shape{-1}), Error);
  EXPECT_THROW(numel(Shape{0, -1}), Error);
  EXPECT_THROW(numel(Shape{kHuge, 2}), Error);
  EXPECT_EQ(numel(Shape{kHuge, 2, 0}), 0);
  EXPECT_THROW(boxes_of_slice(Shape{2, 3}, 5, 2), Error);
  EXPECT_THROW(boxes_of_slice(Shape{2, 3}, -1, 2), Error);
  EXPECT_THROW(boxes_of_slice(Shape{2, 3}, 1, kHuge), Error);
  EXPECT_THROW(check_within({{kHuge}, {kHuge}}, Shape{kHuge}), Error);
  EXPECT_THROW(check_within({{0}, {1}}, Shape{1, 1}), Error);
  EXPECT_NO_THROW(check_within({{2}, {0}}, Shape{2}));
  EXPECT_THROW(intersection({{0}, {1}}, {{0, 0}, {1, 1}}), Error);
}

}  // namespace boxes_test
}  // namespace fsdp::ckpt
