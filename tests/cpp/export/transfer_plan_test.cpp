// Weights that go from ranks that train to ranks with another division: values, bytes, memory, the order of copies and messages, errors,
// and ranks that do not come.

#include "fsdp/transfer_plan.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "comm/mesh/ranks.h"
#include "export/planned_transfer.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/shardings.h"
#include "support/stack.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace transfer_plan_test {

using fsdp::CommError;
using fsdp::TransferGroup;
using fsdp::TransferOptions;
using fsdp::TransferPlan;
using fsdp::WantedBox;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stack_units;
using fsdp::testing::Training;
using fsdp::weights::PlannedTransfer;
using fsdp::weights::PostedMessage;
using fsdp::weights::TransferPeers;
using fsdp::weights::TransferSide;

const fsdp::comm::Label kLabel = {.operation = "test", .unit = {}};

/// Ranks 0 and 1 of four train; the others have the model's shapes.
struct Halves {
  fsdp::DeviceMesh grid = fsdp::init_device_mesh("cpu", {{"role", 2}, {"dp_shard", 2}});
  TransferGroup group{grid};
  bool trains = grid.coordinate("role") == 0;
  std::unique_ptr<Training> training;
  fsdp::testing::Stack shapes{fsdp::testing::StackOptions()};

  Halves() {
    if (trains) training = std::make_unique<Training>(fsdp::FullyShardOptions{.mesh = grid["dp_shard"]});
    shapes->register_buffer("counts", torch::zeros({3, 2}));
  }

  torch::nn::Module* model() const { return trains ? training->model.get() : nullptr; }

  /// The whole weights of now, on all ranks, by way of rank 0.
  NamedTensors whole() const {
    std::map<std::string, at::Tensor> known;
    if (trains) {
      for (const auto& [name, value] : training->handle->full_parameters()) known[name] = value;
      known["counts"] = training->model->named_buffers()["counts"];
    }
    const fsdp::comm::Ranks ranks(grid);
    NamedTensors all;
    const auto add = [&](const std::string& name, const at::Tensor& shape) {
      const auto mine = trains ? known.at(name).contiguous() : at::zeros(shape.sizes());
      all.emplace_back(name, ranks.exchange(mine.view({-1}), kLabel)[0].view(shape.sizes()).clone());
    };
    for (const auto& parameter : shapes->named_parameters()) add(parameter.key(), parameter.value());
    for (const auto& buffer : shapes->named_buffers()) add(buffer.key(), buffer.value());
    return all;
  }
};

/// Part `index` of two, along the last dimension.
at::Tensor half(const at::Tensor& whole, std::int64_t index) {
  if (whole.dim() == 0) return whole;
  const auto size = whole.size(-1);
  return index == 0 ? whole.narrow(-1, 0, size / 2) : whole.narrow(-1, size / 2, size - size / 2);
}

/// Wishes for a half of each tensor, with the tensors into which they go.
struct Halved {
  std::vector<WantedBox> wanted;
  std::vector<at::Tensor> into;

  Halved(const NamedTensors& whole, std::int64_t index, at::ScalarType dtype) {
    for (const auto& [name, value] : whole) {
      const auto part = half(value, index);
      into.push_back(at::full(part.sizes(), -1, at::TensorOptions(dtype)));
      std::vector<std::int64_t> offsets(static_cast<std::size_t>(value.dim()));
      if (index == 1) offsets.back() = value.size(-1) / 2;
      wanted.push_back({.name = name, .into = into.back(), .offsets = offsets});
    }
  }

  void expect(const NamedTensors& whole, std::int64_t index) const {
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(same_bits(into[i], half(whole[i].second, index).to(into[i].scalar_type()))) << whole[i].first;
    }
  }
};

TEST(TransferPlan, TrainersToColumns) {
  run_ranks(4, [](int rank) {
    Halves halves;
    const auto index = rank % 2;
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const std::int64_t message_bytes : {64, 1 << 20}) {
        const auto before = halves.whole();
        Halved mine(before, index, dtype);
        const auto& wanted = halves.trains ? std::vector<WantedBox>() : mine.wanted;
        auto plan =
            fsdp::transfer_plan(halves.model(), halves.group, {.receivers = {2, 3}, .wanted = wanted, .message_bytes = message_bytes});
        EXPECT_LE(plan.largest_bytes(), message_bytes);
        for (int step = 0; step < 2; ++step) {
          if (halves.trains) {
            halves.training->train(step, step + 1);
            // What an operator writes is in the shards when a run begins.
            const torch::NoGradGuard no_grad;
            halves.training->model->parameters().back().fill_(step);
          }
          const auto whole = halves.whole();
          plan.run();
          if (!halves.trains) mine.expect(whole, index);
        }
        std::int64_t received = 0, expected = 0;
        for (const auto& [pair, bytes] : plan.bytes_sent()) received += pair.second == rank ? bytes : 0;
        for (const auto& into : mine.into) expected += halves.trains ? 0 : static_cast<std::int64_t>(into.nbytes());
        EXPECT_EQ(received, expected);  // Each byte has come once.
        std::int64_t in_messages = 0;
        for (const auto& message : plan.messages()) {
          EXPECT_EQ(message.receiver == rank, !halves.trains);
          for (const auto& box : message.boxes) {
            in_messages += c10::multiply_integers(box.sizes) * static_cast<std::int64_t>(c10::elementSize(box.dtype));
          }
        }
        if (!halves.trains) {
          EXPECT_EQ(in_messages, expected);
        }
      }
    }
  });
}

TEST(TransferPlan, RanksThatTrainGetWholesForEverySharding) {
  for (const int size : {1, 2, 4}) {
    run_ranks(size, [size](int rank) {
      const auto all = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
      const TransferGroup group(all);
      std::vector<int> receivers;
      for (int i = 0; i < size; ++i) receivers.push_back(i);
      for (auto& [name, options, compute] : fsdp::testing::shardings(stack_units(), "blocks.1")) {
        // With a mesh of its own, a unit's two rows have other values.
        if (name.starts_with("a mesh of its own") || (size == 1 && options.mesh.dims().size() > 1)) continue;
        SCOPED_TRACE(name);
        Training training(options);
        std::vector<WantedBox> wanted;
        for (const auto& [of, value] : training.handle->full_parameters()) wanted.push_back({.name = of, .into = at::zeros_like(value)});
        auto plan = fsdp::transfer_plan(training.model.get(), group, {.receivers = receivers, .wanted = wanted});
        const auto x = fsdp::testing::stack_input(0, rank).to(compute);
        training.model->forward(x).square().mean().backward();
        training.optimizer->step();
        plan.run();
        const auto whole = training.handle->full_parameters();
        for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(same_bits(wanted[i].into, whole[i].second)) << whole[i].first;
      }
    });
  }
}

TEST(TransferPlan, OnlyWhatHasChangedSinceASnapshot) {
  run_ranks(4, [](int rank) {
    Halves halves;
    const auto index = rank % 2;
    Halved mine(halves.whole(), index, at::kBFloat16);
    auto plan = fsdp::transfer_plan(halves.model(), halves.group,
                                    {.receivers = {2, 3}, .wanted = halves.trains ? std::vector<WantedBox>() : mine.wanted});
    const fsdp::comm::Ranks ranks(halves.grid);
    const auto bytes_of_all = [&] { return ranks.exchange(at::full({1}, plan.travelled_bytes()), kLabel).sum().item<std::int64_t>(); };
    std::int64_t boxes = 0, whole_bytes = 0;
    for (const auto& [pair, bytes] : plan.bytes_sent()) whole_bytes += bytes;
    for (const auto& message : plan.messages()) boxes += static_cast<std::int64_t>(message.boxes.size());
    const auto told = ranks.exchange(at::full({1}, boxes), kLabel).sum().item<std::int64_t>() / 2 * 4;
    fsdp::WeightSnapshot snapshot(at::kCPU);
    const auto run = [&] {
      const auto whole = halves.whole();
      plan.run(snapshot);
      if (!halves.trains) mine.expect(whole, index);
      return bytes_of_all();
    };
    const auto change = [&](std::int64_t step) {
      if (!halves.trains) return;
      const torch::NoGradGuard no_grad;
      // Each parameter is the same on both ranks that train.
      for (auto& parameter : halves.training->model->parameters()) {
        if (parameter.numel() > 40) parameter.view({-1}).narrow(0, step, 2).fill_(100 + step);
      }
    };
    EXPECT_EQ(run(), whole_bytes);
    EXPECT_EQ(snapshot.nbytes(), plan.travelled_bytes());
    EXPECT_EQ(run(), told);  // Nothing has changed.
    for (std::int64_t step = 0; step < 10; ++step) {
      change(3 * step);
      const auto bytes = run();
      EXPECT_GT(bytes, told);
      EXPECT_LT(bytes, told + whole_bytes / 4);
    }
    if (halves.trains) halves.training->train(0, 1);
    EXPECT_LE(run(), whole_bytes + told);
    plan.run();
    EXPECT_EQ(bytes_of_all(), whole_bytes);
  });
}

/// Halves of hidden units: the first layer is cut by rows, the second by columns.
struct PieceImpl : torch::nn::Module {
  PieceImpl(std::int64_t begin, std::int64_t end) {
    torch::manual_seed(3);
    up = register_parameter("up", torch::randn({7, 5}).narrow(0, begin, end - begin).clone());
    down = register_parameter("down", torch::randn({4, 7}).narrow(1, begin, end - begin).clone());
    bias = register_parameter("bias", torch::randn({4}));
  }
  at::Tensor up, down, bias;
};
TORCH_MODULE(Piece);

TEST(TransferPlan, PiecesOfTensorParallelRanks) {
  run_ranks(4, [](int) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"dp_shard", 2}, {"tp", 2}});
    const TransferGroup group(grid);
    const auto tp = grid["tp"];
    const bool is_first = tp.coordinate("tp") == 0;
    Piece model(is_first ? 0 : 3, is_first ? 3 : 7);
    fsdp::fully_shard(*model, {.mesh = grid["dp_shard"], .tensor_parallel = [tp](const std::string& name, const at::Tensor&) {
                                 return name == "bias" ? std::nullopt
                                                       : std::optional(fsdp::TensorParallel{.mesh = tp, .dim = name == "down" ? 1 : 0});
                               }});
    const Piece whole(0, 7);
    std::vector<WantedBox> wanted;
    for (const auto& parameter : whole->named_parameters()) {
      wanted.push_back({.name = parameter.key(), .into = at::zeros(parameter.value().sizes())});
    }
    auto plan = fsdp::transfer_plan(model.get(), group, {.receivers = {0, 1, 2, 3}, .wanted = wanted});
    plan.run();
    for (const auto& box : wanted) EXPECT_TRUE(same_bits(box.into, whole->named_parameters()[box.name].detach())) << box.name;
  });
}

/// Tells what a rank does, in its order: "post", "wait" and "copy".
class Observed final : public TransferPeers {
 public:
  explicit Observed(const TransferGroup& group) : TransferPeers(*group.peers()) {}

  std::vector<Wait> post(const std::vector<PostedMessage>& messages) const override {
    events.emplace_back("post");
    for (const auto& message : messages) {
      sent_bytes += message.sends ? static_cast<std::int64_t>(message.bytes.nbytes()) : 0;
      largest = std::max(largest, static_cast<std::int64_t>(message.bytes.nbytes()));
      memory.insert(message.bytes.storage().data());
    }
    auto waits = TransferPeers::post(messages);
    for (auto& wait : waits) {
      wait = [this, inner = std::move(wait)](std::chrono::milliseconds timeout) {
        inner(timeout);
        events.emplace_back("wait");
      };
    }
    return waits;
  }

  mutable std::vector<std::string> events;
  mutable std::int64_t sent_bytes = 0;
  mutable std::int64_t largest = 0;
  mutable std::set<const void*> memory;  ///< Where messages lay.
};

/// Runs, and returns what the rank has done. Not "copy" twice in succession.
std::vector<std::string> events_of(const Observed& peers, PlannedTransfer& transfer, std::vector<fsdp::weights::HeldValues> held) {
  static const Observed* observed = nullptr;
  observed = &peers;
  const auto callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                   auto& events = observed->events;
                                   if (std::string(function.name()) == "aten::copy_" && (events.empty() || events.back() != "copy"))
                                     events.emplace_back("copy");
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  transfer.run(std::move(held), {}, std::chrono::seconds(20));
  at::removeCallback(callback);
  return peers.events;
}

using Events = std::vector<std::string>;

/// What the ranks of a transfer between two do.
struct Pair {
  std::vector<int> senders;  ///< Each has a matrix [4, 12], of which the other one wants columns, or rows.
  bool by_rows = false;
  at::ScalarType dtype = at::kFloat;
};

/// Returns what this rank has done, and how many places messages lay in.
std::pair<Events, std::size_t> events_of(int rank, const Pair& pair) {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"rank", -1}});
  const TransferGroup group(mesh);
  const auto peers = std::make_shared<Observed>(group);
  const auto values = at::arange(48, at::kFloat).view({4, 12});
  const bool sends = std::ranges::count(pair.senders, rank) > 0;
  const bool receives = std::ranges::count(pair.senders, 1 - rank) > 0;
  TransferSide side;
  at::Tensor into;
  if (sends) {
    const auto name = "matrix of " + std::to_string(rank);
    side.held.push_back(
        {.held = {.name = name, .shape = {4, 12}, .dtype = at::kFloat, .box = fsdp::ckpt::whole({4, 12})}, .values = values + rank});
  }
  if (receives) {
    into = pair.by_rows ? at::zeros({4, 12}, pair.dtype) : at::zeros({8, 4}, pair.dtype).t();
    const auto name = "matrix of " + std::to_string(1 - rank);
    side.targets.push_back(fsdp::weights::target_of(name, into, {{0, pair.by_rows ? 0 : 3}}, std::nullopt));
  }
  const auto held = side.held;
  // A message for each row.
  const std::int64_t row_bytes = (pair.by_rows ? 12 : 8) * static_cast<std::int64_t>(c10::elementSize(pair.dtype));
  std::vector<int> receivers;
  for (const auto sender : pair.senders) receivers.push_back(1 - sender);
  PlannedTransfer transfer(peers, std::move(side),
                           {.receivers = receivers, .message_bytes = row_bytes, .timeout = std::chrono::seconds(20)});
  EXPECT_EQ(transfer.plan().rounds, 4);
  auto events = events_of(*peers, transfer, held);
  EXPECT_EQ(peers->largest, row_bytes);
  EXPECT_EQ(peers->sent_bytes, sends ? 4 * row_bytes : 0);
  if (receives) {
    const auto expected = (pair.by_rows ? values : values.narrow(1, 3, 8)) + (1 - rank);
    EXPECT_TRUE(same_bits(into.contiguous(), expected.to(pair.dtype).contiguous()));
  }
  return {events, peers->memory.size()};
}

TEST(TransferPlan, CopiesAreMadeWhileMessagesTravelInTwoBuffers) {
  run_ranks(2, [](int rank) {
    const auto [events, places] = events_of(rank, {.senders = {0}, .dtype = at::kBFloat16});
    EXPECT_EQ(places, 2);
    // The sender packs the next message before it waits. The receiver posts the next one before it unpacks.
    const Events sends = {"copy", "post", "copy", "wait", "post", "copy", "wait", "post", "copy", "wait", "post", "wait"};
    const Events receives = {"post", "wait", "post", "copy", "wait", "post", "copy", "wait", "post", "copy", "wait", "copy"};
    EXPECT_EQ(events, rank == 0 ? sends : receives);
  });
}

TEST(TransferPlan, ARankThatSendsAndReceivesHasTwoBuffers) {
  run_ranks(2, [](int rank) {
    const auto [events, places] = events_of(rank, {.senders = {0, 1}, .dtype = at::kBFloat16});
    EXPECT_EQ(places, 2);
  });
}

TEST(TransferPlan, OneStretchOfMemoryAtBothEndsIsNotCopied) {
  run_ranks(2, [](int rank) {
    const auto [events, places] = events_of(rank, {.senders = {0}, .by_rows = true});
    EXPECT_EQ(places, 1);  // The tensor itself.
    EXPECT_EQ(events, (Events{"post", "wait", "post", "wait", "post", "wait", "post", "wait"}));
  });
}

/// Every rank gets the same error, and nothing has been sent.
void expect_error(const fsdp::DeviceMesh& mesh, const std::string& part, const std::function<void()>& call) {
  const auto text = message_of(call);
  EXPECT_TRUE(has(text, part)) << text;
  const fsdp::comm::Ranks ranks(mesh);
  EXPECT_NO_THROW(ranks.compare(text, kLabel)) << text;
}

TEST(TransferPlan, ErrorsReachAllRanksAndTrainingGoesOn) {
  run_ranks(2, [](int rank) {
    auto training = std::make_unique<Training>();
    const auto mesh = training->mesh;
    const TransferGroup group(mesh);
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(group.size(), 2);
    const auto name = std::string("entry.weight");  // [10, 3]
    const auto good = WantedBox{.name = name, .into = at::zeros({10, 3})};
    const auto plan_of = [&](std::vector<WantedBox> wanted, TransferOptions options = {.receivers = {1}}) {
      if (rank == 1) options.wanted = std::move(wanted);
      return fsdp::transfer_plan(training->model.get(), group, options);
    };
    const auto refuse = [&](const std::string& part, const WantedBox& box) { expect_error(mesh, part, [&] { plan_of({good, box}); }); };
    refuse("rank 1 wants 'weight', which no rank has", {.name = "weight", .into = good.into});
    refuse("rank 1 wants the box of sizes [10, 3] at [1, 0] of 'entry.weight'", {.name = name, .into = good.into, .offsets = {{1, 0}}});
    refuse("rank 1 of the group: 'entry.weight' is wanted at [1], but goes into a tensor of the shape [10, 3]",
           {.name = name, .into = good.into, .offsets = {{1}}});
    refuse("into a tensor without memory", {.name = name, .into = at::Tensor()});
    for (const auto& into : {at::zeros({1, 3}).expand({10, 3}), at::_neg_view(good.into), good.into.to_sparse()}) {
      refuse("'entry.weight' is to go into a tensor that can't be written in place", {.name = name, .into = into});
    }
    refuse("is to travel as torch.int64 into a tensor of torch.float32", {.name = name, .into = good.into, .dtype = at::kLong});
    refuse("wants 'entry.weight' in Int, but it is Float", {.name = name, .into = good.into.to(at::kInt)});
    expect_error(mesh, "it wants 1 boxes, but is none of the receivers [0]", [&] { plan_of({good}, {.receivers = {0}}); });
    expect_error(mesh, "rank 0 has receivers [0] and message_bytes 33554432, and rank 1 has receivers [1] and message_bytes 33554432",
                 [&] { plan_of({}, {.receivers = {rank}}); });
    expect_error(mesh, "receivers must be ranks of the group, below 2, got [1, 2]", [&] { plan_of({}, {.receivers = {1, 2}}); });
    expect_error(mesh, "message_bytes must be at least 16, got 15", [&] { plan_of({good}, {.receivers = {1}, .message_bytes = 15}); });
    expect_error(mesh, "rank 1 of the group: timeout must be positive, got 0 ms",
                 [&] { plan_of({good}, {.receivers = {1}, .timeout = std::chrono::milliseconds(rank == 1 ? 0 : 9000)}); });
    torch::nn::Linear plain(2, 2);
    expect_error(mesh, "rank 0 of the group: ", [&] {
      fsdp::transfer_plan(rank == 0 ? static_cast<torch::nn::Module*>(plain.get()) : nullptr, group, {.receivers = {1}});
    });
    EXPECT_TRUE(has(message_of([&] { TransferGroup(fsdp::null_device_mesh({{"dp_shard", 3}})); }), "a mesh of all 2 ranks"));
    auto plan = plan_of({good});
    expect_error(mesh, "rank 0 of the group has come for a plan, and rank 1 for a run of plan", [&] {
      if (rank == 1) return plan.run();
      plan_of({});
    });
    training->train(0, 1);
    plan.run();
    const auto whole = training->handle->full_parameters().front();
    EXPECT_EQ(whole.first, name);
    if (rank == 1) {
      EXPECT_TRUE(same_bits(good.into, whole.second));
    }
    fsdp::fully_unshard(*training->model);
    expect_error(mesh, "rank 0 of the group: the model was made ordinary again: make a new plan", [&] { plan.run(); });
  });
}

TEST(TransferPlan, ARankThatDoesNotComeInTimeIsNamed) {
  for (const int late : {0, 1}) {
    run_ranks(2, [late](int rank) {
      Training training;
      const TransferGroup group(training.mesh);
      const auto into = at::zeros({10, 3});
      TransferOptions options{.receivers = {1}, .timeout = std::chrono::milliseconds(300)};
      if (rank == 1) options.wanted = {{.name = "entry.weight", .into = into}};
      const auto come_late = [&](const std::function<void()>& call) {
        if (rank == late) training.mesh.barrier();
        const auto text = message_of<CommError>(call);
        EXPECT_TRUE(has(text, "rank " + std::to_string(late) + " of the group did not arrive within 0.3 s")) << text;
        if (rank != late) training.mesh.barrier();
      };
      come_late([&] { fsdp::transfer_plan(training.model.get(), group, options); });
      auto plan = [&] {
        training.mesh.barrier();
        return fsdp::transfer_plan(training.model.get(), group, options);
      }();
      come_late([&] { plan.run(); });
      training.train(0, 1);
      training.mesh.barrier();
      plan.run();
      const auto whole = training.handle->full_parameters().front().second;
      if (rank == 1) {
        EXPECT_TRUE(same_bits(into, whole));
      }
    });
  }
}

TEST(TransferPlan, AGroupOfAnotherProgramsStore) {
  fsdp::testing::TemporaryFolder folder;
  run_ranks(2, [&](int rank) {
    Training training;
    const auto file = c10::make_intrusive<c10d::FileStore>((folder.path() / "store").string(), 2);
    auto gloo = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", file), rank, 2, gloo);
    const TransferGroup group(backend, c10::make_intrusive<c10d::PrefixStore>("transfer", file));
    const auto into = at::zeros({10, 3}, at::TensorOptions(at::kDouble));
    TransferOptions options{.receivers = {0}};
    if (rank == 0) options.wanted = {{.name = "entry.weight", .into = into, .dtype = at::kBFloat16}};
    fsdp::transfer_plan(training.model.get(), group, options).run();
    const auto whole = training.handle->full_parameters().front().second;
    if (rank == 0) {
      EXPECT_TRUE(same_bits(into, whole.to(at::kBFloat16).to(at::kDouble)));
    }
    EXPECT_TRUE(has(message_of([&] { TransferGroup({}, file); }), "got null"));
    training.mesh.barrier();  // The store's file goes with its last user.
  });
}

}  // namespace transfer_plan_test
