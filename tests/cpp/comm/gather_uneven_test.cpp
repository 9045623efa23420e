// Gathers of shards that differ in size, to all ranks or to some, by each way in which ranks can reach each other.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/null_communicator.h"
#include "fsdp/device_mesh.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/native_world.h"
#include "support/same_bits.h"

namespace fsdp::comm {
namespace gather_uneven_test {

using testing::has;
using testing::message_of;
using testing::native_world;
using testing::run_ranks;

constexpr Label kLabel = {.operation = "uneven gather", .unit = "layers.0"};

std::shared_ptr<Communicator> world(const std::string& transport) {
  if (transport == "native") return native_world();
  return init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = transport == "shared"}).communicator("dp_shard");
}

/// Parts whose sizes no two ranks need have alike: small ones, which travel together, large ones, and those of which ranks have nothing.
struct Parts {
  Parts(const Communicator& communicator, const std::vector<bool>& receives, bool alias) {
    const auto ranks = communicator.size(), own = communicator.rank();
    const auto size_of = [&](int part, int rank) -> std::int64_t {
      switch (part) {
        case 0:
          return 5 + 3 * rank;
        case 1:
          return rank == 0 ? 0 : 1000;
        case 2:
          return 0;
        case 3:
          return 200'000 + 17 * rank;
        case 4:
          return rank == ranks - 1 ? 300'001 : 0;
        default:
          return 64;
      }
    };
    for (int part = 0; part < 6; ++part) {
      std::vector<at::Tensor> of_ranks;
      UnevenPart given;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto bytes = size_of(part, rank);
        given.bytes.push_back(bytes);
        of_ranks.push_back(((at::arange(bytes) * (part + 3) + rank * 7) % 251).to(at::kByte));
      }
      expected.push_back(at::cat(of_ranks));
      given.own = of_ranks[static_cast<std::size_t>(own)];
      own_bytes += given.own.numel();
      if (receives[static_cast<std::size_t>(own)]) {
        given.whole = at::full_like(expected.back(), 255);
        const auto begin = std::accumulate(given.bytes.begin(), given.bytes.begin() + own, std::int64_t{0});
        if (alias) given.own = given.whole.narrow(0, begin, given.own.numel()).copy_(given.own);
      }
      parts.push_back(std::move(given));
    }
  }
  void check() const {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].whole.defined()) {
        EXPECT_TRUE(testing::same_bits(parts[i].whole, expected[i])) << "part " << i;
      }
    }
  }

  std::vector<UnevenPart> parts;
  std::vector<at::Tensor> expected;
  std::int64_t own_bytes = 0;
};

struct Case {
  std::string transport;
  int ranks;
};

class GatherUneven : public ::testing::TestWithParam<Case> {};

TEST_P(GatherUneven, BringsEachByteOnceToEachRankThatReceives) {
  const auto [transport, size] = GetParam();
  run_ranks(size, [&, transport = transport, size = size](int rank) {
    const auto communicator = world(transport);
    std::vector<std::vector<bool>> choices = {std::vector<bool>(static_cast<std::size_t>(size), true)};
    for (int root = 0; root < size; ++root) {
      choices.emplace_back(static_cast<std::size_t>(size), false).at(static_cast<std::size_t>(root)) = true;
    }
    choices.emplace_back(static_cast<std::size_t>(size), true).front() = false;
    for (const auto& receives : choices) {
      for (const bool alias : {false, true}) {
        Parts parts(*communicator, receives, alias);
        communicator->reset_stats();
        const auto pending = communicator->gather_uneven(parts.parts, receives, kLabel);
        pending->wait();
        pending->wait();  // Idempotent.
        parts.check();
        const auto receivers = std::count(receives.begin(), receives.end(), true) - (receives[static_cast<std::size_t>(rank)] ? 1 : 0);
        EXPECT_EQ(communicator->stats().all_gather_bytes, receivers * parts.own_bytes);
        EXPECT_EQ(communicator->stats().shared_memory_bytes, transport == "shared" ? receivers * parts.own_bytes : 0);
        EXPECT_EQ(communicator->stats().all_gathers, 1);
      }
    }
  });
}

TEST_P(GatherUneven, SeveralMayBeInFlightAndOneMayBeDropped) {
  const auto [transport, size] = GetParam();
  run_ranks(size, [&, transport = transport, size = size](int rank) {
    const auto communicator = world(transport);
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    std::vector<Parts> parts;
    for (int i = 0; i < 3; ++i) parts.emplace_back(*communicator, all, true);
    std::vector<std::unique_ptr<Pending>> pending;
    for (const auto& some : parts) pending.push_back(communicator->gather_uneven(some.parts, all, kLabel));
    if (rank == 0) {
      pending.clear();
    } else {
      for (auto one = pending.rbegin(); one != pending.rend(); ++one) (*one)->wait();
    }
    for (const auto& some : parts) some.check();
    communicator->barrier();
  });
}

TEST_P(GatherUneven, BytesArriveWhileNobodyWaits) {
  const auto [transport, size] = GetParam();
  if (transport == "native") return;  // That is its backend's matter.
  run_ranks(size, [&, transport = transport, size = size](int rank) {
    const auto communicator = world(transport);
    std::vector<UnevenPart> parts;
    for (const auto bytes : {std::int64_t{64}, std::int64_t{1} << 20}) {  // Small ones travel together.
      parts.push_back({.whole = at::zeros({bytes * size}, at::kByte),
                       .own = at::full({bytes}, rank + 1, at::kByte),
                       .bytes = std::vector<std::int64_t>(static_cast<std::size_t>(size), bytes)});
    }
    const auto pending = communicator->gather_uneven(parts, std::vector<bool>(static_cast<std::size_t>(size), true), kLabel);
    // Other threads write them meanwhile.
    const auto has_come = [&](const UnevenPart& part, int from) {
      const auto bytes = part.bytes.front();
      const auto* data = static_cast<const volatile std::uint8_t*>(part.whole.const_data_ptr());
      return data[from * bytes] == from + 1 && data[(from + 1) * bytes - 1] == from + 1;
    };
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    int from = 0;
    while (from < size && std::chrono::steady_clock::now() < end) {
      if (has_come(parts[0], from) && has_come(parts[1], from)) {
        ++from;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    EXPECT_EQ(from, size) << "bytes of that rank have not come";
    pending->wait();
  });
}

TEST_P(GatherUneven, RanksThatDifferInSizesOrReceiversGetOneErrorThatNamesBoth) {
  const auto [transport, size] = GetParam();
  if (size == 1) return;
  for (const bool sizes : {true, false}) {
    run_ranks(size, [&, transport = transport, size = size](int rank) {
      const auto communicator = world(transport);
      std::vector<bool> receives(static_cast<std::size_t>(size), true);
      if (!sizes && rank == 0) receives.back() = false;
      const at::Tensor own = at::zeros({rank == 0 ? 3 : 4}, at::kByte);
      UnevenPart part{.whole = {}, .own = own, .bytes = std::vector<std::int64_t>(static_cast<std::size_t>(size), 4)};
      part.bytes.front() = 3;
      if (sizes && rank == 0) part.bytes.back() = 5;
      part.whole = at::zeros({std::accumulate(part.bytes.begin(), part.bytes.end(), std::int64_t{0})}, at::kByte);
      // Of three and more ranks, some hear of it from others, at the latest in their next exchange.
      const auto text = message_of<CommError>([&] {
        communicator->gather_uneven({&part, 1}, receives, kLabel)->wait();
        communicator->barrier();
      });
      if (rank == 0 || size == 2) {
        EXPECT_TRUE(has(text, "uneven gather of unit 'layers.0' (parts of other sizes)")) << text;
      }
      EXPECT_NE(text, "no error");
    });
  }
}

TEST_P(GatherUneven, BuffersThatDoNotFitAreRefusedBeforeAnythingIsSent) {
  const auto [transport, size] = GetParam();
  run_ranks(size, [&, transport = transport, size = size] {
    const auto communicator = world(transport);
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    const std::vector<std::int64_t> bytes(static_cast<std::size_t>(size), 4);
    const auto refused = [&](const UnevenPart& part, const std::vector<bool>& receives) {
      return message_of([&] { communicator->gather_uneven({&part, 1}, receives, kLabel); });
    };
    const at::Tensor whole = at::zeros({4 * size}, at::kByte), own = at::zeros({4}, at::kByte);
    EXPECT_TRUE(has(refused({.whole = whole, .own = at::zeros({3}, at::kByte), .bytes = bytes}, all), "own must have 4 bytes"));
    EXPECT_TRUE(has(refused({.whole = own.narrow(0, 0, 1), .own = own, .bytes = bytes}, all), "whole must have"));
    EXPECT_TRUE(has(refused({.whole = whole.to(at::kInt), .own = own, .bytes = bytes}, all), "whole must have"));
    EXPECT_TRUE(has(refused({.whole = whole, .own = own, .bytes = {4, 4, 4, 4, 4}}, all), "5 sizes for"));
    EXPECT_TRUE(has(refused({.whole = whole, .own = own, .bytes = bytes}, {true, true, true, true, true}), "5 flags for"));
    communicator->barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, GatherUneven,
                         ::testing::Values(Case{"messages", 1}, Case{"messages", 2}, Case{"messages", 4}, Case{"shared", 2},
                                           Case{"shared", 4}, Case{"native", 2}, Case{"native", 4}),
                         [](const auto& info) { return info.param.transport + std::to_string(info.param.ranks); });

TEST(GatherUnevenWithoutPeers, CountsWhatWouldBeSent) {
  NullCommunicator communicator(1, 3);
  const UnevenPart part{.whole = at::zeros({9}, at::kByte), .own = at::zeros({3}, at::kByte), .bytes = {2, 3, 4}};
  communicator.gather_uneven({&part, 1}, {true, true, true}, kLabel)->wait();
  communicator.gather_uneven({&part, 1}, {true, false, false}, kLabel)->wait();
  communicator.gather_uneven({&part, 1}, {false, true, false}, kLabel)->wait();
  EXPECT_EQ(communicator.stats().all_gather_bytes, 6 + 3 + 0);
  EXPECT_EQ(communicator.stats().all_gathers, 3);
}

}  // namespace gather_uneven_test
}  // namespace fsdp::comm
