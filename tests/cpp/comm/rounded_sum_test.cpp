// Contributions to sums that are rounded before they are sent: by messages between all ranks, between hosts, and by a backend's messages.

#include "comm/rounded_sum.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rounded_blocks.h"
#include "comm/call.h"
#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/hosts.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/native_world.h"
#include "support/rounded_reference.h"
#include "support/shared_memory.h"

namespace fsdp::comm {
namespace rounded_sum_test {

using testing::has;
using testing::kReduce;
using testing::message_of;
using testing::numbers;
using testing::run_ranks;
using testing::same_bits;

struct Shape {
  std::int64_t numel;
  at::ScalarType dtype = at::kFloat;
  at::ScalarType out_dtype = at::kFloat;
  bool accumulate = false;
  bool rounded = false;
};

// Whole blocks and a short one, small parts, which are packed, and one that is not.
const std::vector<Shape> kShapes = {
    {.numel = 256},
    {.numel = 0},
    {.numel = 33, .dtype = at::kBFloat16, .rounded = true},
    {.numel = 1, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 1000, .dtype = at::kBFloat16, .accumulate = true},
    {.numel = 70'001, .accumulate = true},
};

// Smaller ones, for a backend's messages: of several pieces, if pieces are small.
const std::vector<Shape> kSmallShapes = {
    {.numel = 256},
    {.numel = 0},
    {.numel = 33, .dtype = at::kBFloat16, .rounded = true},
    {.numel = 1, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 1000, .dtype = at::kBFloat16, .accumulate = true},
    {.numel = 9'001, .accumulate = true},
};

constexpr std::uint64_t kReductionNumber = 3;

const std::vector<GradCommFormat> kFormats = {
    {},
    {.bits = 4, .block = 96},
    {.bits = 8, .hadamard = true},
    {.bits = 4, .block = 32, .hadamard = true, .stochastic_rounding = true, .seed = 7, .error_feedback = true},
    {.bits = 8, .block = 8224, .stochastic_rounding = true},
    {.bits = 4, .error_feedback = true},
};

/// Reductions of these shapes by ranks of which `ranks` neighbours each sum exactly: a host's, or one alone.
struct RoundedReduce {
  RoundedReduce(Communicator& communicator, int ranks, const GradCommFormat& format, const std::vector<Shape>& shapes = kShapes)
      : communicator_(communicator), ranks_(ranks), hosts_(communicator.size() / ranks), format_(format), shapes_(shapes) {
    for (const Shape& shape : shapes_) {
      at::Tensor lost;
      if (format.error_feedback) lost = at::zeros({(hosts_ - 1) * shape.numel});
      lost_.push_back(lost);
      // What other senders lose of what they send to this rank.
      expected_lost_.push_back(format.error_feedback ? at::zeros({hosts_, shape.numel}) : at::Tensor());
    }
  }

  /// Returns the bytes of contributions for one receiver, and those of the shards. `change` may write into the gradients of all ranks, by
  /// part: [ranks, all elements].
  std::pair<std::int64_t, std::int64_t> check(
      int step, const std::vector<bool>& gives = {}, const std::function<void(std::vector<at::Tensor>&)>& change = [](auto&) {}) {
    constexpr double kScale = 1.0 / 3;
    std::vector<at::Tensor> gradients;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      std::vector<at::Tensor> of_ranks;
      for (int rank = 0; rank < communicator_.size(); ++rank) {
        of_ranks.push_back(
            numbers(communicator_.size() * shapes_[i].numel, step * 1000 + static_cast<int>(i) * 100 + rank, shapes_[i].dtype));
      }
      gradients.push_back(at::stack(of_ranks));
    }
    change(gradients);
    std::vector<ReducePart> parts;
    std::vector<at::Tensor> expected;
    std::int64_t encoded = 0, exact = 0;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const auto [numel, dtype, out_dtype, accumulate, rounded] = shapes_[i];
      const std::uint64_t key = mix(static_cast<std::uint64_t>(step), i);
      const auto bytes = encoded_bytes(format_, numel);
      encoded += bytes;
      exact += numel * static_cast<std::int64_t>(elementSize(dtype));
      parts.push_back({.unreduced = gradients[i][communicator_.rank()].clone(),
                       .staging = at::empty({communicator_.traffic().staging_bytes(numel, format_, dtype)}, at::kByte),
                       .out = numbers(numel, step, out_dtype),
                       .accumulate = accumulate,
                       .rounded = rounded,
                       .gives = gives,
                       .encoding = Encoding{.format = format_, .key = key, .reduction_number = kReductionNumber, .lost = lost_[i]}});
      const SumEnd end = {.scale = kScale, .rounded = rounded ? dtype : at::ScalarType::Undefined, .accumulate = accumulate};
      expected.push_back(numel == 0 ? parts.back().out.clone()
                                    : testing::expected_sum(contributions(i, gradients[i], gives, key), parts.back().out, end));
    }
    communicator_.reset_stats();
    const auto pending = communicator_.reduce_scatter(parts, kScale, kReduce);
    pending->wait();
    pending->wait();  // Accumulates once.
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(at::equal(parts[i].out.isnan(), expected[i].isnan())) << "part " << i;
      EXPECT_TRUE(same_bits(parts[i].out.nan_to_num(), expected[i].nan_to_num())) << "part " << i << " of " << describe(format_);
      EXPECT_TRUE(!lost_[i].defined() || lost_[i].isfinite().all().item<bool>()) << "part " << i;
    }
    return {encoded, exact};
  }

 private:
  bool counts(const std::vector<bool>& gives, int rank) const { return gives.empty() || gives[static_cast<std::size_t>(rank)]; }

  /// Of each host, in fp32, as they are summed on this rank.
  std::vector<at::Tensor> contributions(std::size_t i, const at::Tensor& gradients, const std::vector<bool>& gives, std::uint64_t key) {
    const auto numel = shapes_[i].numel;
    const int own = communicator_.rank() / ranks_;
    std::vector<at::Tensor> all;
    for (int host = 0; host < hosts_; ++host) {
      std::vector<at::Tensor> of_host;
      bool any = ranks_ > 1;
      for (int rank = host * ranks_; rank < (host + 1) * ranks_; ++rank) {
        const auto region = gradients[rank].narrow(0, communicator_.rank() * numel, numel).to(at::kFloat);
        of_host.push_back(counts(gives, rank) ? region : at::zeros_like(region));
        any = any || counts(gives, rank);
      }
      at::Tensor sum = testing::expected_sum(of_host, at::zeros({numel}), {});
      if (host != own && any) {
        const auto of_pair = mix(mix(mix(key, kReductionNumber), static_cast<std::uint64_t>(host)), static_cast<std::uint64_t>(own));
        const auto lost = expected_lost_[i].defined() ? expected_lost_[i][host] : at::Tensor();
        sum = testing::rounded_contribution(format_, sum, of_pair, lost);
      }
      all.push_back(sum);
    }
    return all;
  }

  Communicator& communicator_;
  const int ranks_;
  const int hosts_;
  const GradCommFormat format_;
  const std::vector<Shape> shapes_;
  std::vector<at::Tensor> lost_;
  std::vector<at::Tensor> expected_lost_;
};

/// Puts NaN and infinities into what rank 0 sends to the others, and into what rank 1 has for itself; and a block of zeros.
void spoil(std::vector<at::Tensor>& gradients) {
  const auto last = 256 * (gradients[0].size(0) - 1);
  gradients[0][0][last + 130] = std::nan("");
  gradients[0][1][256 + 3] = std::numeric_limits<float>::infinity();
  gradients[5][0][gradients[5].size(1) / gradients[5].size(0)] = -std::numeric_limits<float>::infinity();
  gradients[0][0].narrow(0, last, 128).zero_();
}

/// Several reductions in each format. `check_bytes(bytes of contributions for one receiver, bytes of shards, sends)` is called after each.
template <typename CheckBytes>
void check_formats(Communicator& communicator, int ranks, const std::vector<Shape>& shapes, const CheckBytes& check_bytes) {
  for (const auto& format : kFormats) {
    RoundedReduce reduce(communicator, ranks, format, shapes);
    const auto check = [&](bool sends, const auto&... arguments) {
      const auto [encoded, exact] = reduce.check(arguments...);
      check_bytes(encoded, exact, sends);
    };
    check(true, 0);
    if (communicator.size() == 1 || !format.error_feedback) continue;
    std::vector<bool> gives(static_cast<std::size_t>(communicator.size()), true);
    gives[1] = false;
    check(communicator.rank() != 1, 1, gives);
    check(true, 2, std::vector<bool>(), spoil);
    check(true, 3);  // Nothing of it is left.
  }
}
void check_formats(Communicator& communicator, int ranks) {
  check_formats(communicator, ranks, kShapes, [&](std::int64_t encoded, std::int64_t, bool sends) {
    const auto& stats = communicator.stats();
    // A rank whose gradients do not count sends the sums of its host.
    const std::int64_t wire = sends || ranks > 1 ? (communicator.size() / ranks - 1) * encoded : 0;
    EXPECT_EQ(stats.reduce_scatter_bytes - stats.shared_memory_bytes, wire);
    EXPECT_EQ(stats.shared_memory_bytes > 0, sends && ranks > 1);
  });
}

class RoundedSumOfSize : public ::testing::TestWithParam<int> {};

TEST_P(RoundedSumOfSize, RoundsWhatIsSentAndNothingElse) {
  run_ranks(GetParam(), [] { check_formats(*testing::world(/*shared=*/false), 1); });
}
INSTANTIATE_TEST_SUITE_P(Sizes, RoundedSumOfSize, ::testing::Values(1, 2, 4));

class RoundedSumOfHosts : public testing::SharedMemoryTest {};

TEST_F(RoundedSumOfHosts, RoundsTheSumsOfHosts) {
  if (!testing::can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  run_ranks(4, [](int rank) {
    testing::pretend_hosts(rank, 2);
    const auto communicator = testing::world();
    ASSERT_TRUE(testing::shares(*communicator));
    check_formats(*communicator, 2);
  });
}

TEST_F(RoundedSumOfHosts, NothingIsRoundedWithinAHost) {
  run_ranks(2, [] {
    const auto communicator = testing::world();
    ASSERT_TRUE(testing::shares(*communicator));
    EXPECT_EQ(communicator->traffic().contributions(), 0);
    EXPECT_EQ(communicator->traffic().staging_bytes(100, {}, at::kFloat), 0);
    testing::Reduce reduce(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, 0.5);
    reduce.parts[0].encoding = Encoding{.format = {.bits = 4}};
    communicator->reduce_scatter(reduce.parts, 0.5, kReduce)->wait();
    reduce.check();
  });
}

struct NativeHosts {
  int count;
  int ranks;  ///< Of each.
  std::int64_t piece_staging = SumLevels::kPieceStaging;
};

class RoundedSumByABackend : public ::testing::TestWithParam<NativeHosts> {};

// As NCCL sums. The hosts' sums are exact, as those of ranks that share memory; where a host has one rank, or where there is one host, each
// rank counts as one.
TEST_P(RoundedSumByABackend, RoundsWhatCrosses) {
  const auto [count, ranks_per_host, piece_staging] = GetParam();
  run_ranks(count * ranks_per_host, [&, ranks_per_host = ranks_per_host, piece_staging = piece_staging] {
    const auto [backend, communicator] = testing::counting_world(ranks_per_host, piece_staging);
    const int size = communicator->size(), ranks = ranks_per_host < size ? ranks_per_host : 1, hosts = size / ranks;
    EXPECT_EQ(communicator->traffic().contributions(), hosts - 1);
    const auto check_bytes = [&, &backend = backend, &communicator = communicator](std::int64_t encoded, std::int64_t exact, bool) {
      // A rank whose gradients do not count sends zeros.
      std::int64_t all = 0;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == communicator->rank()) continue;
        const bool is_neighbour = peer / ranks == communicator->rank() / ranks, is_equal = peer % ranks == communicator->rank() % ranks;
        const std::int64_t expected = is_neighbour ? hosts * exact : is_equal ? encoded : 0;
        EXPECT_EQ(backend->sent[static_cast<std::size_t>(peer)], expected) << "to rank " << peer;
        all += expected;
      }
      EXPECT_EQ(communicator->stats().reduce_scatter_bytes, all);
      backend->sent.assign(static_cast<std::size_t>(size), 0);
    };
    check_formats(*communicator, ranks, kSmallShapes, check_bytes);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, RoundedSumByABackend,
                         ::testing::Values(NativeHosts{2, 1}, NativeHosts{1, 3}, NativeHosts{2, 2}, NativeHosts{3, 1, 6000},
                                           NativeHosts{2, 3, 6000}),
                         [](const auto& info) {
                           const NativeHosts& hosts = info.param;
                           return std::to_string(hosts.count) + "x" + std::to_string(hosts.ranks) +
                                  (hosts.piece_staging < SumLevels::kPieceStaging ? "InPieces" : "");
                         });

// Ranks that would decode with another format, or draw other numbers than a rerun.
TEST(RoundedSum, RanksThatDifferGetAnError) {
  for (const std::string what : {"format", "key", "number"}) {
    run_ranks(2, [&](int rank) {
      const auto communicator = testing::world(/*shared=*/false);
      Encoding encoding{.format = {.stochastic_rounding = true}, .key = 5};
      if (rank == 1) (what == "format" ? encoding.format.seed : what == "key" ? encoding.key : encoding.reduction_number) = 6;
      const auto numbers = testing::numbers(200, 1, at::kFloat);
      const ReducePart part{.unreduced = numbers,
                            .staging = at::empty({communicator->traffic().staging_bytes(100, encoding.format, at::kFloat)}, at::kByte),
                            .out = at::empty({100}),
                            .encoding = encoding};
      const auto message = message_of<CommError>([&] { communicator->reduce_scatter({&part, 1}, 1, kReduce)->wait(); });
      EXPECT_TRUE(has(message, "the ranks make different calls")) << message;
    });
  }
}

TEST(RoundedSum, RefusesWhatDoesNotFit) {
  run_ranks(2, [] {
    const auto communicator = testing::world(/*shared=*/false);
    const auto with = [&](at::ScalarType dtype, std::int64_t staging, std::int64_t lost) {
      const ReducePart part{.unreduced = at::zeros({64}, dtype),
                            .staging = at::empty({staging}, at::kByte),
                            .out = at::zeros({32}),
                            .encoding = Encoding{.format = {.error_feedback = true}, .lost = at::zeros({lost})}};
      return message_of([&] { communicator->reduce_scatter({&part, 1}, 1, kReduce); });
    };
    EXPECT_TRUE(has(with(at::kDouble, 72, 32), "double is not encoded"));
    EXPECT_TRUE(has(with(at::kFloat, 71, 32), "staging must have 72 bytes"));
    EXPECT_TRUE(has(with(at::kFloat, 72, 31), "error feedback needs 32 elements"));
    EXPECT_EQ(with(at::kFloat, 72, 32), "no error");
  });
}

}  // namespace rounded_sum_test
}  // namespace fsdp::comm
