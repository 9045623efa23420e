#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "comm/communicator.h"
#include "comm/rank_order_sum.h"
#include "support/same_bits.h"

// Data that every rank can compute for every other rank, and what the collectives should make of it.
namespace fsdp::testing {

inline constexpr comm::Label kGather = {.operation = "all-gather", .unit = "layers.0"};
inline constexpr comm::Label kScatter = {.operation = "scatter", .unit = "layers.0"};
inline constexpr comm::Label kReduce = {.operation = "reduce-scatter", .unit = "layers.0"};

/// The same numbers on every rank for the same seed; of mixed magnitudes and signs, so that a sum's order and precision show.
inline at::Tensor numbers(std::int64_t numel, std::int64_t seed, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  const auto values = at::randn({numel}, generator, at::kDouble) * at::pow(10.0, at::randn({numel}, generator, at::kDouble));
  return values.to(dtype);
}

/// A tensor's elements, by c10's own conversions. (A tensor for each element would take most of the tests' time.)
template <typename T>
std::vector<T> elements(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(dense.numel()));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dense.scalar_type(), "elements", [&] {
    const auto* data = dense.const_data_ptr<scalar_t>();
    for (std::int64_t i = 0; i < dense.numel(); ++i) values.push_back(c10::convert<T>(data[i]));
  });
  return values;
}

/// Element by element: what rank_order_sum promises.
template <typename Acc>
at::Tensor plain_sum(const std::vector<at::Tensor>& sources, const at::Tensor& old, at::ScalarType out_dtype, const comm::SumEnd& end) {
  at::Tensor out = at::empty({sources[0].numel()}, out_dtype);
  std::vector<std::vector<Acc>> terms;
  terms.reserve(sources.size());
  for (const auto& source : sources) terms.push_back(elements<Acc>(source));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out_dtype, "plain_sum", [&] {
    // Old values are added as double to double, and as float to all others.
    using Old = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const std::vector<Old> before = end.accumulate ? elements<Old>(old) : std::vector<Old>();
    auto* data = out.mutable_data_ptr<scalar_t>();
    std::vector<Acc> sums(terms.size());
    for (std::size_t i = 0; i < terms[0].size(); ++i) {
      for (std::size_t r = 0; r < terms.size(); ++r) sums[r] = terms[r][i];
      for (std::size_t count = sums.size(); count > 1; count = (count + 1) / 2) {  // Neighbours in pairs, again and again.
        for (std::size_t r = 0; r < count; r += 2) sums[r / 2] = r + 1 < count ? sums[r] + sums[r + 1] : sums[r];
      }
      Acc sum = sums[0] * static_cast<Acc>(end.scale);
      const bool has_digits = std::is_same_v<Acc, float> && sizeof(scalar_t) > 2;
      if (has_digits && end.rounded == at::kBFloat16) sum = c10::convert<Acc>(c10::convert<at::BFloat16>(sum));
      if (has_digits && end.rounded == at::kHalf) sum = c10::convert<Acc>(c10::convert<at::Half>(sum));
      data[i] = end.accumulate ? c10::convert<scalar_t>(before[i] + sum) : c10::convert<scalar_t>(sum);
    }
  });
  return out;
}

inline at::Tensor expected_sum(const std::vector<at::Tensor>& sources, const at::Tensor& old, const comm::SumEnd& end) {
  if (sources[0].scalar_type() == at::kDouble) return plain_sum<double>(sources, old, old.scalar_type(), end);
  return plain_sum<float>(sources, old, old.scalar_type(), end);
}

struct PieceShape {
  std::int64_t numel;  ///< Of one shard.
  at::ScalarType dtype;
  at::ScalarType out_dtype = at::kFloat;
  bool accumulate = false;
};

/// A gathered buffer, and what should be in it.
struct Gather {
  Gather(const comm::Communicator& communicator, const std::vector<PieceShape>& shapes, std::int64_t seed, bool alias) {
    const int size = communicator.size();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto [numel, dtype, out_dtype, accumulate] = shapes[i];
      std::vector<at::Tensor> shards;
      for (int r = 0; r < size; ++r) shards.push_back(numbers(numel, seed + 1000 * static_cast<std::int64_t>(i) + r, dtype));
      expected.push_back(at::cat(shards));
      const auto own = static_cast<std::size_t>(communicator.rank());
      const at::Tensor full = at::full({size * numel}, -1, dtype);
      at::Tensor shard = shards[own];
      if (alias) shard = full.narrow(0, communicator.rank() * numel, numel).copy_(shard);
      parts.push_back({.full = full, .shard = shard});
    }
  }

  void check() const {
    for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(same_bits(parts[i].full, expected[i])) << "part " << i;
  }

  std::vector<comm::GatherPart> parts;
  std::vector<at::Tensor> expected;
};

/// Buffers of a scatter: rank r gets r elements more than rank 0 does, and of every other part all get the same. `alias`: the root's shard
/// stays where it is.
struct Scatter {
  Scatter(const comm::Communicator& communicator, const std::vector<PieceShape>& shapes, std::int64_t seed, int root, bool alias) {
    const int size = communicator.size();
    const auto own = static_cast<std::size_t>(communicator.rank());
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      std::vector<at::Tensor> shards;
      for (int r = 0; r < size; ++r) {
        const bool same = i % 2 == 1;
        shards.push_back(
            numbers(shapes[i].numel + (same ? 0 : r), seed + 1000 * static_cast<std::int64_t>(i) + (same ? 0 : r), shapes[i].dtype));
      }
      expected.push_back(shards[own].clone());
      comm::ScatterPart part{.shards = {}, .into = at::full_like(shards[own], -1)};
      if (communicator.rank() == root) {
        if (alias) part.into = shards[own];
        part.shards = std::move(shards);
      }
      parts.push_back(std::move(part));
    }
  }

  void check() const {
    for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(same_bits(parts[i].into, expected[i])) << "part " << i;
  }

  std::vector<comm::ScatterPart> parts;
  std::vector<at::Tensor> expected;
};

/// Buffers of a reduce-scatter, and what should be in `out`. `gives`: as in ReducePart; a rank that does not give has NaN.
struct Reduce {
  Reduce(const comm::Communicator& communicator, const std::vector<PieceShape>& shapes, std::int64_t seed, double scale,
         const std::vector<bool>& gives = {}) {
    const int size = communicator.size();
    const int own = communicator.rank();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto [numel, dtype, out_dtype, accumulate] = shapes[i];
      std::vector<at::Tensor> sources;
      at::Tensor unreduced;
      for (int r = 0; r < size; ++r) {
        at::Tensor of_rank = numbers(size * numel, seed + 1000 * static_cast<std::int64_t>(i) + r, dtype);
        const bool counts = gives.empty() || gives[static_cast<std::size_t>(r)];
        if (r == own) unreduced = counts ? of_rank : at::full_like(of_rank, std::nan(""));
        if (!counts) of_rank = at::zeros_like(of_rank);
        sources.push_back(of_rank.narrow(0, own * numel, numel));
      }
      const at::Tensor out = numbers(numel, seed - 1, out_dtype);
      expected.push_back(numel == 0 ? out.clone() : expected_sum(sources, out, {.scale = scale, .accumulate = accumulate}));
      parts.push_back({.unreduced = unreduced,
                       .staging = at::empty({communicator.staging_numel(numel, dtype)}, dtype),
                       .out = out,
                       .accumulate = accumulate,
                       .rounded = false,
                       .sum_dtype = {},
                       .gives = gives});
    }
  }

  void check() const {
    for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(same_bits(parts[i].out, expected[i])) << "part " << i;
  }

  std::vector<comm::ReducePart> parts;
  std::vector<at::Tensor> expected;
};

/// Reductions to which all ranks but the last give, the last one alone, every other one, and none. `all_send`: those that do not give, too.
inline void check_reductions_of_some(comm::Communicator& communicator, const std::vector<PieceShape>& shapes, bool all_send = false) {
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<std::vector<bool>> sets(4, std::vector<bool>(size));
  for (std::size_t rank = 0; rank < size; ++rank) {
    sets[0][rank] = rank != size - 1;
    sets[1][rank] = rank == size - 1;
    sets[2][rank] = rank % 2 == 0;
  }
  for (const auto& gives : sets) {
    communicator.reset_stats();
    Reduce reduce(communicator, shapes, 5, 1.0 / 3, gives);
    communicator.reduce_scatter(reduce.parts, 1.0 / 3, kReduce)->wait();
    reduce.check();
    const bool sends = size > 1 && (all_send || gives[static_cast<std::size_t>(communicator.rank())]);
    EXPECT_EQ(communicator.stats().reduce_scatter_bytes > 0, sends);
  }
}

/// Collectives that are all in flight at once, 2 * `count` of them on two communicators of the same ranks, or on one and the same. Each
/// rank waits for them in an order of its own. `in_rank_order`: whether these communicators' sums are, and so can be checked.
inline void check_many_in_flight(comm::Communicator& one, comm::Communicator& other, int count, at::ScalarType reduced,
                                 bool in_rank_order) {
  std::vector<Gather> gathers;
  std::vector<Reduce> reduces;
  for (int i = 0; i < count; ++i) {
    gathers.emplace_back(one, std::vector<PieceShape>{{.numel = 1000 + i, .dtype = at::kFloat}, {.numel = 3, .dtype = at::kHalf}}, 10 * i,
                         i % 2 == 0);
    reduces.emplace_back(one, std::vector<PieceShape>{{.numel = 500 + i, .dtype = reduced}}, 10 * i, 0.5);
  }
  std::vector<std::unique_ptr<comm::Pending>> pending;
  for (std::size_t i = 0; i < gathers.size(); ++i) {
    const bool swapped = i % 3 == 0;
    pending.push_back((swapped ? one : other).all_gather(gathers[i].parts, kGather));
    pending.push_back((swapped ? other : one).reduce_scatter(reduces[i].parts, 0.5, kReduce));
  }
  if (one.rank() % 2 == 0) std::reverse(pending.begin(), pending.end());
  std::rotate(pending.begin(), pending.begin() + 10 * one.rank(), pending.end());
  for (const auto& each : pending) each->wait();
  for (const Gather& gather : gathers) gather.check();
  if (!in_rank_order) return;
  for (const Reduce& reduce : reduces) reduce.check();
}

}  // namespace fsdp::testing
