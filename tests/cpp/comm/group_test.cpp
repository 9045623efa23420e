#include "comm/collectives/group.h"

#include <signal.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/launch/launch.h"
#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace group_test {

using testing::Gather;
using testing::has;
using testing::kGather;
using testing::message_of;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;

std::shared_ptr<Communicator> world() { return testing::line().communicator("dp_shard"); }

constexpr auto kLimit = std::chrono::seconds(60);  // Whoever waits for the mesh's time-out of ten minutes has failed.

void gather(Communicator& communicator, const char* unit, std::int64_t numel = 10, std::uint64_t model = 0) {
  Gather gather(communicator, {{.numel = numel, .dtype = at::kFloat}}, 1, false);
  communicator.all_gather(gather.parts, {.operation = "all-gather", .unit = unit, .model = model})->wait();
}

void reduce(Communicator& communicator, const char* unit, std::int64_t numel = 10) {
  Reduce reduce(communicator, {{.numel = numel, .dtype = at::kFloat}}, 1, 1);
  communicator.reduce_scatter(reduce.parts, 1, {.operation = "reduce-scatter", .unit = unit})->wait();
}

// Runs `one` on the ranks that `odd` names and `other` on the rest: all must throw a CommError that prints both sides.
struct Fork {
  std::function<bool(int rank)> odd;
  std::function<void(Communicator&)> one, other;
  std::string one_text, other_text;
};

void expect_divergence(int ranks, const Fork& fork) {
  run_ranks(
      ranks,
      [&](int rank) {
        const auto communicator = world();
        gather(*communicator, "shared");
        const std::string message = message_of<CommError>([&] { (fork.odd(rank) ? fork.one : fork.other)(*communicator); });
        EXPECT_TRUE(
            has(message, "on rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " failed: the ranks make different calls: "))
            << message;
        EXPECT_TRUE(has(message, ": #3 " + fork.one_text)) << message;
        EXPECT_TRUE(has(message, ": #3 " + fork.other_text)) << message;
        EXPECT_TRUE(has(message, "All ranks must run the same steps on the same units in the same order.")) << message;
        const std::string next = message_of<CommError>([&] { communicator->barrier(); });
        EXPECT_TRUE(has(next, "barrier on rank " + std::to_string(rank)) &&
                    has(next, "was not started, because an earlier collective failed"))
            << next;
      },
      kLimit);
}

bool is_one(int rank) { return rank == 1; }

// Ranks find each other's calls in messages, or in shared memory.
class GroupOfSize : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void SetUp() override { setenv("FSDP_SHARED_MEMORY", std::get<1>(GetParam()) ? "1" : "0", 1); }
  void TearDown() override { unsetenv("FSDP_SHARED_MEMORY"); }
  static int ranks() { return std::get<0>(GetParam()); }
};

TEST_P(GroupOfSize, ARankThatSkipsAUnitIsNamedOnAllRanks) {
  for (const int odd : {0, 1}) {
    expect_divergence(ranks(), {.odd = [&](int rank) { return rank == odd; },
                                .one = [](Communicator& c) { gather(c, "layers.1"); },
                                .other = [](Communicator& c) { gather(c, "layers.0"); },
                                .one_text = "all-gather of unit 'layers.1'",
                                .other_text = "all-gather of unit 'layers.0'"});
  }
}

// Of one size, so that each could be taken for the other; the ranks that agree are neighbours, and then they are not.
TEST_P(GroupOfSize, TwoPartiesNameEachOther) {
  for (const bool neighbours : {false, true}) {
    expect_divergence(ranks(), {.odd = [&](int rank) { return neighbours ? rank >= (ranks() + 1) / 2 : rank % 2 == 1; },
                                .one = [](Communicator& c) { reduce(c, "layers.1"); },
                                .other = [](Communicator& c) { gather(c, "layers.0"); },
                                .one_text = "reduce-scatter of unit 'layers.1'",
                                .other_text = "all-gather of unit 'layers.0'"});
  }
}

// Gloo ends the process of who receives more than he expects.
TEST_P(GroupOfSize, SizesThatDifferAreNamed) {
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { gather(c, "layers.0", 11); },
                              .other = [](Communicator& c) { gather(c, "layers.0", 10); },
                              .one_text = "all-gather of unit 'layers.0' (44 bytes)",
                              .other_text = "all-gather of unit 'layers.0' (40 bytes)"});
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { reduce(c, "layers.0", 100'000); },
                              .other = [](Communicator& c) { reduce(c, "layers.0", 10); },
                              .one_text = "reduce-scatter of unit 'layers.0' (400000 bytes)",
                              .other_text = "reduce-scatter of unit 'layers.0' (40 bytes)"});
}

TEST_P(GroupOfSize, PiecesThatDifferAreNamed) {
  const auto gather_two = [](Communicator& c, std::int64_t first, std::int64_t second) {
    Gather gather(c, {{.numel = first, .dtype = at::kFloat}, {.numel = second, .dtype = at::kFloat}}, 1, false);
    c.all_gather(gather.parts, kGather)->wait();
  };
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [&](Communicator& c) { gather_two(c, 10, 20); },
                              .other = [&](Communicator& c) { gather_two(c, 20, 10); },
                              .one_text = "all-gather of unit 'layers.0' (parts of other sizes)",
                              .other_text = "all-gather of unit 'layers.0' (parts of other sizes)"});
}

TEST_P(GroupOfSize, ModelsWithTheSameUnitsAreToldApart) {
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { gather(c, "layers.0", 10, 7); },
                              .other = [](Communicator& c) { gather(c, "layers.0", 10, 8); },
                              .one_text = "all-gather of unit 'layers.0' of model 7",
                              .other_text = "all-gather of unit 'layers.0' of model 8"});
}

TEST_P(GroupOfSize, FactsAndUpdatesAreCompared) {
  const auto differ = [&](const Label& one, const Label& other, const std::string& one_text, const std::string& other_text) {
    const auto gather_with = [](Communicator& c, const Label& label) {
      Gather gather(c, {{.numel = 10, .dtype = at::kFloat}}, 1, false);
      c.all_gather(gather.parts, label)->wait();
    };
    expect_divergence(ranks(), {.odd = is_one,
                                .one = [&](Communicator& c) { gather_with(c, one); },
                                .other = [&](Communicator& c) { gather_with(c, other); },
                                .one_text = "all-gather of unit 'layers.0'" + one_text,
                                .other_text = "all-gather of unit 'layers.0'" + other_text});
  };
  Label label = testing::kGather;
  Label other = label;
  other.facts.layout = 1;
  const std::string parameters = " (parameters of other names, shapes or dtypes, in another order, or others of them frozen)";
  differ(label, other, parameters, parameters);
  other = label;
  other.facts.switches = 2;
  differ(label, other, " (requires_all_reduce false)", " (requires_all_reduce true)");
  other = label;
  other.facts.divide_factor = std::bit_cast<std::uint64_t>(2.5);
  differ(label, other, " (gradient_divide_factor 0)", " (gradient_divide_factor 2.5)");
  other = label;
  other.updates = "lr 0.1, eps 1e-08";
  differ(label, other, " before an update", " after an update with lr 0.1");
  label.updates = "lr 0.1, eps 1e-06";
  differ(label, other, " after an update with eps 1e-06", " after an update with eps 1e-08");
  // Also in what there is no room for.
  const std::string many(250, 'x');
  const std::string one_text = many + ", eps 1", other_text = many + ", eps 2";
  label.updates = one_text;
  other.updates = other_text;
  differ(label, other, " after an update with ", " after an update with ");
}

TEST_P(GroupOfSize, HostExchangesAreCollectivesToo) {
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { c.broadcast("text", 0, {.operation = "text", .unit = {}}); },
                              .other = [](Communicator& c) { c.gather("text", {.operation = "texts", .unit = {}}); },
                              .one_text = "text",
                              .other_text = "texts"});
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { c.barrier(); },
                              .other = [](Communicator& c) { c.exchange(torch::ones({3}), {.operation = "norms", .unit = {}}); },
                              .one_text = "barrier",
                              .other_text = "norms"});
  expect_divergence(ranks(), {.odd = is_one,
                              .one = [](Communicator& c) { c.expect_equal("text", {.operation = "check", .unit = {}}); },
                              .other =
                                  [](Communicator& c) {
                                    Scatter scatter(c, {{.numel = 10, .dtype = at::kFloat}}, 1, 0, false);
                                    c.scatter(scatter.parts, 0, testing::kScatter)->wait();
                                    c.barrier();  // A scatter from rank 0 needs nothing of rank 1.
                                  },
                              .one_text = "check",
                              .other_text = "scatter of unit 'layers.0'"});
}

// The last rank waits when its peers have given up already, and left word.
TEST_P(GroupOfSize, WhoWaitsLateIsTold) {
  const auto late_gather = [](Communicator& c, const char* unit) {
    Gather gather(c, {{.numel = 10, .dtype = at::kFloat}}, 1, false);
    const auto pending = c.all_gather(gather.parts, {.operation = "all-gather", .unit = unit});
    if (c.rank() == c.size() - 1) usleep(500'000);
    pending->wait();
  };
  expect_divergence(ranks(), {.odd = [](int rank) { return rank == 1; },
                              .one = [&](Communicator& c) { late_gather(c, "layers.1"); },
                              .other = [&](Communicator& c) { late_gather(c, "layers.0"); },
                              .one_text = "all-gather of unit 'layers.1'",
                              .other_text = "all-gather of unit 'layers.0'"});
}

// And who comes when they have gone.
TEST_P(GroupOfSize, WhoStartsLateIsTold) {
  run_ranks(
      ranks(),
      [](int rank) {
        const auto communicator = world();
        const bool late = rank == communicator->size() - 1;
        const std::string message = message_of<CommError>([&] {
          if (!late) {
            gather(*communicator, rank == 0 ? "layers.0" : "layers.1");
            gather(*communicator, "layers.2");
          }
          usleep(500'000);
          gather(*communicator, "layers.3");
        });
        if (communicator->size() == 2 || !late) {
          EXPECT_TRUE(has(message, "the ranks make different calls")) << message;
        } else {
          EXPECT_TRUE(has(message, "#2 all-gather of unit 'layers.0'") && has(message, "#2 all-gather of unit 'layers.1'")) << message;
        }
      },
      kLimit);
}

TEST_P(GroupOfSize, CollectivesInFlightAreComparedInTheirOrder) {
  run_ranks(
      ranks(),
      [](int rank) {
        const auto communicator = world();
        const std::vector<testing::PieceShape> shapes = {{.numel = 1000, .dtype = at::kFloat}};
        Gather first(*communicator, shapes, 1, false), second(*communicator, shapes, 2, false), third(*communicator, shapes, 3, false);
        const bool odd = rank == 1;
        std::unique_ptr<Pending> agreed, other, last;
        // Who is late is told by any of its calls, the first one included. All ranks agree on the last one: whether it comes through
        // depends on who has noticed what by then.
        std::string messages = message_of<CommError>([&] {
          agreed = communicator->all_gather(first.parts, kGather);
          other = communicator->all_gather(second.parts, {.operation = "all-gather", .unit = odd ? "b" : "a"});
          last = communicator->all_gather(third.parts, kGather);
          last->wait();
          third.check();
        });
        if (other) {
          const std::string diverged = message_of<CommError>([&] { other->wait(); });
          EXPECT_NE(diverged, "no error");
          messages += diverged;
        }
        EXPECT_TRUE(has(messages, "#3 all-gather of unit 'a'") && has(messages, "#3 all-gather of unit 'b'")) << messages;
        // Nothing reaches the buffers any more, nor did the others' data.
        for (const Gather* each : {&second, &third}) {
          const at::Tensor& full = each->parts[0].full;
          const auto theirs = full.narrow(0, (1 - std::min(rank, 1)) * 1000, 1000);
          if (each == &second && (odd || communicator->size() == 2)) {
            EXPECT_TRUE((theirs == -1).all().item<bool>()) << "took other data for its own";
          }
          full.fill_(5);
        }
        usleep(100'000);
        EXPECT_TRUE((second.parts[0].full == 5).all().item<bool>());
        EXPECT_TRUE((third.parts[0].full == 5).all().item<bool>());
        if (agreed) message_of<CommError>([&] { agreed->wait(); });  // Whether its messages came before is a matter of moments.
      },
      kLimit);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GroupOfSize, ::testing::Combine(::testing::Values(2, 3, 4, 5), ::testing::Bool()));

TEST(Group, OneRankThatStartsAgainAloneEndsAllRanks) {
  // What an engine does after reset(): from the first unit again, while its peers go on.
  run_ranks(
      3,
      [](int rank) {
        const auto communicator = world();
        const auto step = [&] {
          for (const char* unit : {"layers.0", "layers.1", "layers.2"}) {
            gather(*communicator, unit);
            if (rank == 2 && unit == std::string("layers.1")) throw std::runtime_error("bad batch");
          }
          for (const char* unit : {"layers.2", "layers.1", "layers.0"}) reduce(*communicator, unit);
        };
        const std::string message = message_of<CommError>([&] {
          try {
            step();
          } catch (const CommError&) {
            throw;
          } catch (const std::runtime_error&) {
            step();
          }
        });
        EXPECT_TRUE(has(message, "#4 all-gather of unit 'layers.2'") && has(message, "rank 2: #4 all-gather of unit 'layers.0'"))
            << message;
      },
      kLimit);
}

TEST(Group, TheFirstFailureIsToldToAll) {
  ::testing::internal::CaptureStderr();
  const int result = launch_ranks(4,
                                  [] {
                                    alarm(30);
                                    const auto communicator = world();
                                    if (communicator->rank() == 3) raise(SIGKILL);
                                    const std::string message = message_of<CommError>([&] { gather(*communicator, "layers.0"); });
                                    // Rank 3's own connection, or the word of one who saw it close.
                                    if (!has(message, "rank 3)") || !has(message, "has failed or ended"))
                                      throw Error("message: " + message);
                                    return 0;
                                  },
                                  {});
  EXPECT_EQ(result, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 3 was killed by signal 9 (Killed)\n");
}

TEST(Group, LaterCallsNameTheFirstFailure) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    const auto first = message_of<CommError>([&] { gather(*communicator, rank == 1 ? "layers.1" : "layers.0"); });
    for (const char* unit : {"layers.7", "layers.8"}) {
      const auto later = message_of<CommError>([&] { gather(*communicator, unit); });
      EXPECT_TRUE(has(later, unit)) << later;
      EXPECT_TRUE(has(later, "because an earlier collective failed: " + first)) << later;
    }
  });
}

TEST(Group, PendingCallsNameTheFirstFailure) {
  run_ranks(3, [](int rank) {
    const auto mesh = testing::line();
    const auto communicator = mesh.communicator("dp_shard");
    const auto another = mesh.new_communicator("dp_shard");
    Gather one(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 1, false);
    Gather two(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 2, false);
    const auto differs = communicator->all_gather(one.parts, {.operation = "all-gather", .unit = rank == 1 ? "layers.1" : "layers.0"});
    const auto behind = communicator->all_gather(two.parts, {.operation = "all-gather", .unit = "layers.5"});
    another->barrier();  // All have started both.
    const auto first = message_of<CommError>([&] { differs->wait(); });
    const auto later = message_of<CommError>([&] { behind->wait(); });
    EXPECT_TRUE(has(later, "layers.5")) << later;
    EXPECT_TRUE(has(later, "because an earlier collective failed: " + first)) << later;
  });
}

TEST(Group, ARankThatLeavesWithoutAWordFailsTheOthers) {
  for (const int ranks : {2, 3, 4}) {
    const std::function<void(int)> leaves = [](int rank) {
      const auto communicator = world();
      if (rank == 1) _exit(0);
      const std::string message = message_of<CommError>([&] { gather(*communicator, "layers.0", 1'000'000); });
      EXPECT_TRUE(has(message, "has failed or ended")) << message;
    };
    ::testing::internal::CaptureStderr();
    const int result = launch_ranks(ranks, [&] { return testing::run_rank(leaves, ranks, kLimit); }, {.grace = std::chrono::seconds(60)});
    // A rank in which an expectation failed would be named, too.
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 left by exit(0) before its function returned\n");
    EXPECT_EQ(result, 1);
  }
}

TEST(Tags, KindsNeverMeetAndNumbersWrap) {
  const Call call = make_call(5, {.operation = "all-gather", .unit = "a"}, 40, 1);
  for (std::size_t i = 0; i < 100; ++i) EXPECT_GE(tags::data(call, i), 0x40000000);
  EXPECT_EQ(tags::header(0xffffffffffffffffu), 0x0fffffff);
  EXPECT_EQ(tags::comparison(0xffffffffffffffffu), 0x1fffffff);
  EXPECT_NE(tags::header(7), tags::comparison(7));
}

TEST(Tags, FollowFromAllThatACollectiveIs) {
  const Label label{.operation = "all-gather", .unit = "a"};
  const int tag = tags::data(make_call(5, label, 40, 1), 0);
  EXPECT_EQ(tags::data(make_call(5, label, 40, 1), 0), tag);
  EXPECT_NE(tags::data(make_call(5, label, 40, 1), 1), tag);
  EXPECT_NE(tags::data(make_call(6, label, 40, 1), 0), tag);
  EXPECT_NE(tags::data(make_call(5, label, 44, 1), 0), tag);
  EXPECT_NE(tags::data(make_call(5, label, 40, 2), 0), tag);
  EXPECT_NE(tags::data(make_call(5, {.operation = "all-gather", .unit = "b"}, 40, 1), 0), tag);
  EXPECT_NE(tags::data(make_call(5, {.operation = "reduce-scatter", .unit = "a"}, 40, 1), 0), tag);
  EXPECT_NE(tags::data(make_call(5, {.operation = "all-gather", .unit = "a", .model = 1}, 40, 1), 0), tag);
  const std::string longest(300, 'x');
  EXPECT_NE(make_call(5, {.operation = "all-gather", .unit = longest + "a"}, 40, 1),
            make_call(5, {.operation = "all-gather", .unit = longest + "b"}, 40, 1));
}

}  // namespace group_test
}  // namespace fsdp::comm
