#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "comm/collectives/group.h"
#include "comm/collectives/native_communicator.h"
#include "comm/mesh/rendezvous.h"
#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/device_mesh.h"
#include "support/device_row.h"
#include "support/held_headers.h"
#include "support/messages.h"
#include "support/stack.h"
#include "support/temporary_folder.h"

// On a device, the host goes on while the headers of other ranks are on their way (see the note Headers beside a device in comm/group.h).
namespace late_headers_test {

using fsdp::CommError;
using fsdp::comm::NativeCommunicator;
using fsdp::testing::has;
using fsdp::testing::HeaderGate;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::Stack;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;
using fsdp::testing::TemporaryFolder;

constexpr auto kLimit = std::chrono::seconds(60);  // The time-out of messages is ten minutes: whoever waits for it has failed.

/// All ranks, whose headers come when the gate is open.
struct Ranks {
  Ranks(const TemporaryFolder& folder, int rank, int size) {
    fsdp::comm::Row row{.dim = "dp_shard", .rank = rank, .global_ranks = {}, .world_size = size};
    for (int other = 0; other < size; ++other) row.global_ranks.push_back(other);
    fsdp::comm::Rendezvous rendezvous(c10::make_intrusive<c10d::FileStore>(folder.path() / "store", size), rank, size, "row",
                                      std::chrono::minutes(10));
    auto control = c10::make_intrusive<fsdp::testing::HeldHeaders>(rendezvous.gloo_group(row, "control"), gate);
    communicator = std::make_shared<NativeCommunicator>(row, sim::make_collectives(rendezvous.gloo_group(row, "data")), control);
  }

  fsdp::DeviceMesh mesh() const { return fsdp::testing::mesh_over(communicator); }

  std::unique_ptr<fsdp::comm::Pending> gather(const std::string& unit, std::int64_t numel = 10) const {
    const auto options = at::TensorOptions().device(sim::device(communicator->rank())).dtype(at::kFloat);
    const auto shard = at::full({numel}, communicator->rank(), options);
    const std::vector<fsdp::comm::GatherPart> parts = {{.full = at::empty({communicator->size() * numel}, options), .shard = shard}};
    return communicator->all_gather(parts, {.operation = "all-gather", .unit = unit});
  }

  const std::shared_ptr<HeaderGate> gate = std::make_shared<HeaderGate>();
  std::shared_ptr<NativeCommunicator> communicator;
};

/// Whether `call` returns though the gate is closed.
bool goes_on(HeaderGate& gate, const std::function<void()>& call) {
  gate.is_open = false;
  call();
  return !gate.is_overdue;
}

/// Whether `call` returns only when a gate is opened, which each rank's is after a while: the first rank whose gate is open tells the
/// others what it has found. `opened` is a file by which ranks know that one is.
bool waits_for_headers(HeaderGate& gate, const std::function<void()>& call, const std::filesystem::path& opened = {}) {
  gate.is_open = false;
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (!opened.empty()) std::ofstream(opened).flush();
    gate.is_open = true;
  });
  call();
  const bool waited = gate.is_open || std::filesystem::exists(opened);
  opener.join();
  return waited;
}

class LateHeaders : public ::testing::TestWithParam<int> {};

TEST_P(LateHeaders, AreNotWaitedForByAGather) {
  const TemporaryFolder folder;
  const int size = GetParam();
  run_ranks_on_device(size, [&](int rank) {
    const Ranks ranks(folder, rank, size);
    EXPECT_TRUE(goes_on(*ranks.gate, [&] { ranks.gather("u")->wait_unconfirmed(); }));
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] { ranks.communicator->confirm(); }));
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] { ranks.gather("u")->wait(); })) << "what others use is compared first";
  });
}

TEST_P(LateHeaders, KeepARankNearItsNeighbour) {
  const TemporaryFolder folder;
  const int size = GetParam();
  run_ranks_on_device(size, [&](int rank) {
    const Ranks ranks(folder, rank, size);
    constexpr int kAhead = 64;
    EXPECT_TRUE(goes_on(*ranks.gate, [&] {
      for (int i = 0; i < kAhead; ++i) ranks.gather("u")->wait_unconfirmed();
    }));
    ranks.gate->is_open = true;
    ranks.communicator->confirm();
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] {
      for (int i = 0; i <= kAhead; ++i) ranks.gather("u")->wait_unconfirmed();
    }));
  });
}

/// Ranks that differ, of which rank 1 is the odd one.
struct Divergence {
  std::function<void(const Ranks&)> odd, other;
  std::vector<std::string> said;  ///< By all.
  bool is_found_at_once = false;  ///< By a rank that has failed by itself.
};

void expect_one_error(int size, const Divergence& divergence) {
  const TemporaryFolder folder;
  run_ranks(
      size,
      [&](int rank) {
        c10::impl::VirtualGuardImpl(c10::kPrivateUse1).setDevice(sim::device(rank));
        const Ranks ranks(folder, rank, size);
        ranks.gather("shared")->wait_unconfirmed();
        // The headers come when the host waits for its device, if that has something to wait for.
        ranks.gate->first_held = 2;
        std::string message;
        const auto call = [&] {
          message = message_of<CommError>([&] {
            (rank == 1 ? divergence.odd : divergence.other)(ranks);
            ranks.communicator->confirm();
            // Of four ranks, two are not beside the odd one; and who has failed by itself is heard of later. An exchange tells them.
            if (size > 2 || divergence.is_found_at_once) ranks.communicator->barrier();
          });
        };
        EXPECT_TRUE(waits_for_headers(*ranks.gate, call, folder.path() / "opened") || divergence.is_found_at_once);
        for (const auto& said : divergence.said) EXPECT_TRUE(has(message, said)) << message;
        EXPECT_THROW(ranks.communicator->barrier(), CommError);
      },
      kLimit);
}

const auto gather_twice = [](const std::string& unit, std::int64_t numel) {
  return [=](const Ranks& ranks) {
    for (int i = 0; i < 2; ++i) ranks.gather(unit, numel)->wait_unconfirmed();
  };
};

TEST_P(LateHeaders, NameUnitsThatDiffer) {
  expect_one_error(GetParam(), {.odd = gather_twice("layers.1", 10),
                                .other = gather_twice("layers.0", 10),
                                .said = {"#2 all-gather of unit 'layers.0'", "#2 all-gather of unit 'layers.1'"}});
}

// The device waits for bytes that never come: only a thread that does not wait for it can end that.
TEST_P(LateHeaders, NameSizesThatDiffer) {
  expect_one_error(GetParam(), {.odd = gather_twice("layers.0", 11),
                                .other = gather_twice("layers.0", 10),
                                .said = {"#2 all-gather of unit 'layers.0' (44 bytes)", "#2 all-gather of unit 'layers.0' (40 bytes)"}});
}

TEST_P(LateHeaders, NameACallThatIsMissing) {
  expect_one_error(GetParam(), {.odd = [](const Ranks& ranks) { ranks.communicator->barrier(); },
                                .other = gather_twice("layers.0", 10),
                                .said = {"#2 all-gather of unit 'layers.0'", "#2 barrier"}});
}

// All headers agree, and nobody is due to get another one: the device of the others waits for who has failed.
TEST_P(LateHeaders, AreNotNeededToHearOfAFailure) {
  const auto fails = [](const Ranks& ranks) {
    const auto on_host = at::empty({ranks.communicator->size() * 10});
    const std::vector<fsdp::comm::GatherPart> parts = {{.full = on_host, .shard = on_host.narrow(0, 0, 10)}};
    ranks.communicator->all_gather(parts, {.operation = "all-gather", .unit = "layers.0"});
  };
  expect_one_error(GetParam(), {.odd = fails,
                                .other = gather_twice("layers.0", 10),
                                .said = {"all-gather of unit 'layers.0' on rank 1 of", "sim: a collective got a tensor of cpu"},
                                .is_found_at_once = true});
}

// Nor is a call: the host may be waiting for its device.
TEST(LateHeadersOfAGroup, AreNotNeededToHearOfAnAlarm) {
  const TemporaryFolder folder;
  run_ranks(
      2,
      [&](int rank) {
        const fsdp::comm::Row row{.dim = "dp_shard", .rank = rank, .global_ranks = {0, 1}, .world_size = 2};
        fsdp::comm::Rendezvous rendezvous(c10::make_intrusive<c10d::FileStore>(folder.path() / "store", 2), rank, 2, "row",
                                          std::chrono::minutes(10));
        fsdp::comm::Group group(row, rendezvous.gloo_group(row, "control"), rendezvous.gloo_group(row, "data"), nullptr,
                                fsdp::comm::Group::Ends::kElsewhere, fsdp::comm::Group::Compares::kLate);
        if (rank == 1) {
          try {
            throw std::runtime_error("planned");
          } catch (const std::exception&) {
            group.failure({.operation = "one rank's own", .unit = {}});
          }
        }
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (!group.failed() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_TRUE(group.failed());
      },
      kLimit);
}

std::int64_t collectives_of(int rank) {
  std::int64_t count = 0;
  for (const auto& [name, times] : sim::stats(rank).kernels) count += name.starts_with("simccl::") ? times : 0;
  return count;
}

TEST_P(LateHeaders, AreEarlyInDebugMode) {
  setenv("FSDP_DEBUG", "1", 1);
  const auto only_begin = [](const char* unit) { return [unit](const Ranks& ranks) { static_cast<void>(ranks.gather(unit)); }; };
  const TemporaryFolder folder;
  const int size = GetParam();
  run_ranks_on_device(size, [&](int rank) {
    const Ranks ranks(folder, rank, size);
    ranks.gather("shared")->wait_unconfirmed();
    const auto collectives = collectives_of(rank);
    const std::string message = message_of<CommError>([&] { only_begin(rank == 1 ? "layers.1" : "layers.0")(ranks); });
    EXPECT_TRUE(has(message, "all-gather of unit 'layers.0'") && has(message, "all-gather of unit 'layers.1'")) << message;
    EXPECT_EQ(collectives_of(rank), collectives) << "has begun";
  });
  unsetenv("FSDP_DEBUG");
}

INSTANTIATE_TEST_SUITE_P(Ranks, LateHeaders, ::testing::Values(2, 4));

/// Its second and third blocks have the same sizes.
struct Trainee {
  explicit Trainee(const Ranks& all, const char* strategy = "optim_grads_params")
      : ranks(all), model(make_stack({.hidden = {13, 7, 7, 16}})) {
    model->to(sim::device(ranks.communicator->rank()));
    fsdp::fully_shard(*model, {.mesh = ranks.mesh(), .units = stack_units(), .placements = fsdp::Placements::from_name(strategy)});
    for (int step = 0; step < 2; ++step) loss(step).backward();
  }
  at::Tensor loss(int step, std::vector<std::size_t> order = {}) {
    const int rank = ranks.communicator->rank();
    return model->forward(stack_input(step, rank).to(sim::device(rank)), std::move(order)).square().mean();
  }
  const Ranks& ranks;
  Stack model;
};

// The first block's backward begins when all units have been gathered again, and some have been reduced.
TEST(LateHeadersOfAStep, AreNotWaitedForWithinIt) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const Ranks ranks(folder, rank, 2);
    Trainee trainee(ranks);
    bool reached_first_block = false;
    trainee.model->observer = [&](const std::string& event) {
      if (event != "backward blocks.0") return;
      reached_first_block = !ranks.gate->is_open;
      ranks.gate->is_open = true;
    };
    EXPECT_TRUE(goes_on(*ranks.gate, [&] { trainee.loss(3).backward(); }));
    EXPECT_TRUE(reached_first_block);
  });
}

TEST(LateHeadersOfAStep, AreWaitedForWhenItsBackwardEnds) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const Ranks ranks(folder, rank, 2);
    Trainee trainee(ranks, "no_shard");  // whose last gathers of gradients come when the ranks have agreed
    const auto before = ranks.gate->newest.load();
    trainee.loss(3).backward();
    const auto of_step = ranks.gate->newest - before;
    ranks.gate->first_held = ranks.gate->newest + of_step;  // Of the last gather.
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] { trainee.loss(4).backward(); }));
    EXPECT_EQ(ranks.gate->newest, ranks.gate->first_held);
  });
}

TEST(LateHeadersOfAStep, AreWaitedForWhenAForwardEnds) {
  const TemporaryFolder folder;
  run_ranks_on_device(2, [&](int rank) {
    const Ranks ranks(folder, rank, 2);
    Trainee trainee(ranks);
    EXPECT_TRUE(goes_on(*ranks.gate, [&] { trainee.loss(3); }));
    const auto engine = fsdp::handle(*trainee.model).engine();
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] { engine->end_forward(); })) << "where somebody tells";
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(waits_for_headers(*ranks.gate, [&] { trainee.loss(4); })) << "where nobody does, and no backward comes";
  });
}

TEST(LateHeadersOfAStep, EndItBeforeGradientsAreUsed) {
  const TemporaryFolder folder;
  run_ranks(
      2,
      [&](int rank) {
        c10::impl::VirtualGuardImpl(c10::kPrivateUse1).setDevice(sim::device(rank));
        const Ranks ranks(folder, rank, 2);
        Trainee trainee(ranks);
        const std::size_t odd = rank == 0 ? 1 : 2;
        const std::string message = message_of<std::exception>([&] { trainee.loss(3, {0, odd}).backward(); });
        EXPECT_TRUE(has(message, "unit 'blocks.1'") && has(message, "unit 'blocks.2'")) << message;
        EXPECT_TRUE(has(message, "the ranks make different calls")) << message;
      },
      kLimit);
}

}  // namespace late_headers_test
