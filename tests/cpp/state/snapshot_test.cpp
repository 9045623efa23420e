// A snapshot's bytes reach the host in two steps: what may be written at any time at once, the rest beside training. Who would write it
// waits.

#include "state/snapshot.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "support/logging_device.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace snapshot_test {

using fsdp::Placements;
using fsdp::state::CheckpointRanks;
using fsdp::state::HostBuffer;
using fsdp::state::Snapshot;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stack_loss;
using fsdp::testing::Training;

Snapshot snapshot_of(Training& run) {
  const CheckpointRanks ranks(*run.handle->engine(), CheckpointRanks::Groups::kOfMesh);
  return fsdp::state::take_snapshot(*run.model, run.optimizer.get(), {{"mine", at::ones({2})}}, {}, ranks);
}

/// Copies of this rank's main parameters.
std::vector<at::Tensor> main_parameters(const Training& run) {
  std::vector<at::Tensor> copies;
  for (const auto& unit : run.handle->engine()->units()) {
    for (const auto& main : unit->main.parts) copies.push_back(main.clone());
  }
  return copies;
}

const void* first_bytes(const Snapshot& snapshot) {
  for (const auto& tensor : snapshot.tensors) {
    if (!tensor.chunks.empty()) return tensor.chunks.front().bytes.const_data_ptr();
  }
  return nullptr;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_bits);
}

TEST(HostBuffer, CopiesAtOnceWhatOperatorsWrite) {
  struct Case {
    const char* name;
    Placements placements;
    bool parameters_are_guarded;
  };
  for (const auto& [name, placements, parameters_are_guarded] : {Case{"no_shard", Placements::no_shard(), false},
                                                                 {"optim", Placements::optim(), false},
                                                                 {"optim_grads", Placements::optim_grads(), false},
                                                                 {"optim_grads_params", Placements::optim_grads_params(), true}}) {
    SCOPED_TRACE(name);
    run_ranks(2, [&, placements = placements, parameters_are_guarded = parameters_are_guarded](int rank) {
      Training run({.placements = placements});
      run.train(0, 2);
      const auto state = snapshot_of(run);
      auto copied = state;
      HostBuffer buffer(at::kCPU);
      buffer.begin(copied);
      int chunks = 0;
      const auto for_each_chunk = [&](const auto& check) {
        for (std::size_t i = 0; i < state.tensors.size(); ++i) {
          SCOPED_TRACE(state.tensors[i].key);
          for (std::size_t c = 0; c < state.tensors[i].chunks.size(); ++c)
            check(state.tensors[i].chunks[c], copied.tensors[i].chunks[c].bytes);
        }
      };
      for_each_chunk([&](const Snapshot::Chunk& chunk, const at::Tensor& copy) {
        ++chunks;
        EXPECT_NE(copy.const_data_ptr(), chunk.bytes.const_data_ptr());
        EXPECT_TRUE(same_bits(copy, chunk.guarded ? at::zeros_like(chunk.bytes) : chunk.bytes));
      });
      EXPECT_GT(chunks, 10);
      for (const auto& tensor : state.tensors) {
        for (const auto& chunk : tensor.chunks) {
          const bool operators_write = tensor.key.starts_with("extra.") ||
                                       (tensor.key.starts_with("model.") && (tensor.key == "model.counts" || !parameters_are_guarded));
          EXPECT_EQ(chunk.guarded, !operators_write) << tensor.key << " of rank " << rank;
        }
      }
      buffer.finish();
      for_each_chunk([&](const Snapshot::Chunk& chunk, const at::Tensor& copy) { EXPECT_TRUE(same_bits(copy, chunk.bytes)); });

      // The memory is used again.
      auto next = snapshot_of(run);
      buffer.begin(next);
      EXPECT_EQ(first_bytes(next), first_bytes(copied));
      buffer.finish();
    });
  }
}

// Users may write through them at any time.
// Another thread is at the first device, and would make a context there.
TEST(HostBuffer, WaitsAtItsDevice) {
  run_ranks(1, [](int) {  // A device starts threads, which a process must not have that forks.
    using fsdp::testing::LoggingDevice;
    const LoggingDevice device;
    HostBuffer buffer(LoggingDevice::device());
    Snapshot empty;
    buffer.begin(empty);
    LoggingDevice::take_events();
    buffer.finish();
    EXPECT_EQ(LoggingDevice::take_events().front(), "the host waits under a guard");
  });
}

TEST(HostBuffer, CopiesAtOnceWhatUsersHaveShardsOf) {
  run_ranks(2, [] {
    Training run;
    run.train(0, 1);
    const auto shards = run.handle->parameter_shards();
    for (const auto& tensor : snapshot_of(run).tensors) {
      for (const auto& chunk : tensor.chunks)
        EXPECT_EQ(chunk.guarded, tensor.key.starts_with("optim.") || tensor.key.starts_with("fsdp.")) << tensor.key;
    }
  });
}

class Writers : public ::testing::Test {
 protected:
  fsdp::testing::TemporaryFolder folder;
};

/// A reader that has ended when somebody waits for it: `at_wait` runs then, in the thread that waits.
std::future<void> reader(const std::function<void()>& at_wait) { return std::async(std::launch::deferred, at_wait); }

/// `write` must wait for a reader, and leave the main parameters alone until then.
void expect_waits(Training& run, const char* what, const std::function<void()>& write, bool changes = true) {
  SCOPED_TRACE(what);
  run.handle->engine()->main().flush_writes();
  const auto before = main_parameters(run);
  int waits = 0;
  run.handle->engine()->main().set_reader(reader([&] {
    ++waits;
    EXPECT_TRUE(same(main_parameters(run), before));
  }));
  write();
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(same(main_parameters(run), before), !changes);
}

TEST_F(Writers, WaitForTheReader) {
  run_ranks(2, [&](int rank) {
    Training run;
    const auto path = (folder.path() / "1").string();
    fsdp::save(path, *run.model, *run.optimizer);
    {
      // What only reads does not wait.
      bool waited = false;
      run.handle->engine()->main().set_reader(reader([&] { waited = true; }));
      stack_loss(run.model, 0, rank).backward();
      EXPECT_FALSE(waited);
      run.handle->engine()->main().set_reader({});
      EXPECT_TRUE(waited);
    }
    expect_waits(run, "step", [&] { run.optimizer->step(); });
    expect_waits(
        run, "parameter_shards", [&] { run.handle->parameter_shards(); }, /*changes=*/false);
    expect_waits(
        run, "main_parameters_changed", [&] { run.handle->main_parameters_changed(); }, /*changes=*/false);
    expect_waits(run, "an operator", [&] {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.model->parameters()) parameter.mul_(2);
      run.handle->reshard();
    });
    expect_waits(run, "SummonFullParams", [&] {
      const fsdp::SummonFullParams whole(*run.model);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.model->parameters()) parameter.mul_(2);
    });
    expect_waits(run, "load", [&] { fsdp::load(path, *run.model, *run.optimizer); });
  });
}

// One that ends without an answer is one that has ended.
TEST_F(Writers, DoNotWaitForAReaderThatIsGone) {
  run_ranks(1, [] {
    Training run;
    run.handle->engine()->main().set_reader(std::promise<void>().get_future());
    run.train(0, 1);
  });
}

}  // namespace snapshot_test
