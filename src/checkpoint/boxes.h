#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

/// Files of checkpoints: torch.distributed.checkpoint's (DCP) and Hugging Face's formats, and the commit of a folder of them. Nothing here
/// knows models or processes, and nothing needs torch. (`fsdp::activation_checkpoint` is the function for activation checkpointing.)
namespace fsdp::ckpt {

using Shape = std::vector<std::int64_t>;

/// The number of elements. Throws Error for a negative size, or if the product does not fit 63 bits.
std::int64_t numel(std::span<const std::int64_t> sizes);

/// A part of a tensor as DCP names it: elements [offsets[d], offsets[d] + sizes[d]) of every dimension d, stored row-major. A scalar is the
/// box without dimensions, of one element.
struct Box {
  Shape offsets;
  Shape sizes;

  bool operator==(const Box&) const = default;
};

/// The whole tensor. DCP lists this box for a tensor without elements, too.
Box whole(Shape shape);

/// Throws Error unless the box lies in a tensor of this shape.
void check_within(const Box& box, std::span<const std::int64_t> shape);

/// Elements [offset, offset + numel) of a tensor's row-major order as boxes that follow one another in that order, as few as there can be:
/// for a matrix part of a row, whole rows, part of a row; in general at most 2 * dimensions - 1, and none for numel = 0. The data of each
/// box are therefore a contiguous part of the slice, which begins at the sum of the sizes of the boxes before it.
std::vector<Box> boxes_of_slice(std::span<const std::int64_t> shape, std::int64_t offset, std::int64_t numel);

/// Returns elements [offset, offset + numel) of a box as boxes of the tensor that it is a part of.
std::vector<Box> boxes_of_slice(const Box& box, std::int64_t offset, std::int64_t numel);

/// The box of elements that two boxes of one tensor share; nothing if they share none.
std::optional<Box> intersection(const Box& a, const Box& b);

/// Appends the elements of box `a` that box `b` of the same tensor does not have, as boxes that share no element.
void append_difference(const Box& a, const Box& b, std::vector<Box>& boxes);

/// Elements that lie side by side in two places, counted from the beginning of each.
struct Run {
  std::int64_t source = 0;
  std::int64_t destination = 0;
  std::int64_t length = 0;

  bool operator==(const Run&) const = default;
};

/// Returns the runs that copy the elements of box `source` to box `destination` of the same tensor: as few as possible, in ascending order
/// in both.
std::vector<Run> runs_to_box(const Box& source, const Box& destination);

/// Returns the runs for a destination that is a slice of the tensor, or of a box of it, given by the boxes that boxes_of_slice() returns
/// for it.
std::vector<Run> runs_to_slice(const Box& source, std::span<const Box> slice);

}  // namespace fsdp::ckpt
