// Checkpoints of models and optimizers: a run goes on as if nothing had been, on any number of ranks and with any sharding; what is wrong
// is one error on every rank, and changes nothing.

#include "fsdp/save_load.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace save_load_test {

namespace fs = std::filesystem;

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::adamw;
using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::make;
using fsdp::testing::make_stack;
using fsdp::testing::MakeOptimizer;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::stored_tensors;
using fsdp::testing::Training;

class SaveLoad : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

TEST_F(SaveLoad, ARunContinuesBitForBit) {
  struct Case {
    std::string name;
    FullyShardOptions options;
    MakeOptimizer make_optimizer = adamw();
  };
  const auto by_blocks = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(fsdp::AdamW8bit::kBlock); };
  const std::vector<Case> cases = {
      {"ZeRO-3", {}},
      {"ZeRO-0", {.placements = Placements::no_shard()}},
      {"bf16", {.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}}},
      {"offloaded", {.offload = fsdp::Offload::kAll}},
      {"state offloaded", {.offload = fsdp::Offload::kOptimizerState}},
      {"SGD", {}, make<fsdp::SGD>(fsdp::SGDOptions{.lr = 1e-2, .momentum = 0.9, .dampening = 0.5})},
      {"Muon", {.granularity = fsdp::whole_matrices()}, make<fsdp::Muon>(fsdp::MuonOptions{.lr = 1e-2})},
      {"AdamW8bit", {.granularity = by_blocks}, make<fsdp::AdamW8bit>(fsdp::AdamW8bitOptions{.lr = 1e-2, .min_8bit_size = 64})}};
  run_ranks(2, [&](int rank) {
    for (const auto& [name, options, make_optimizer] : cases) {
      SCOPED_TRACE(name);
      Training run(options, make_optimizer);
      fsdp::save(path(name + " at its start"), *run.model, *run.optimizer);
      const auto loss = [&, &options = options](Training& some, int step) {
        const auto x = fsdp::testing::stack_input(step, rank).to(options.mixed_precision ? at::kBFloat16 : at::kFloat);
        return some.model->forward(x).square().mean();
      };
      const auto train = [&](Training& some, int from, int to) {
        for (int step = from; step < to; ++step) {
          loss(some, step).backward();
          some.optimizer->step();
          some.optimizer->zero_grad();
        }
      };
      train(run, 0, 2);
      run.optimizer->set_lr_factor(0.5);
      fsdp::save(path(name), *run.model, *run.optimizer,
                 {{"step", std::int64_t{2}}, {"name", std::string("a run")}, {"loss", 0.5}, {"done", false}, {"order", at::arange(3)}});
      const auto random = torch::randn({2});
      train(run, 2, 4);

      Training other(options, make_optimizer, 12);
      train(other, 7, 8);  // Another past.
      const auto loaded = fsdp::load(path(name), *other.model, *other.optimizer);
      EXPECT_TRUE(loaded.rng);
      EXPECT_TRUE(torch::equal(torch::randn({2}), random));
      EXPECT_EQ(std::get<std::int64_t>(loaded.extra.at("step")), 2);
      EXPECT_EQ(std::get<std::string>(loaded.extra.at("name")), "a run");
      EXPECT_EQ(std::get<double>(loaded.extra.at("loss")), 0.5);
      EXPECT_FALSE(std::get<bool>(loaded.extra.at("done")));
      EXPECT_TRUE(torch::equal(std::get<at::Tensor>(loaded.extra.at("order")), at::arange(3)));
      EXPECT_TRUE(same_bits(other.model->named_buffers()["counts"], run.model->named_buffers()["counts"]));
      EXPECT_EQ(other.optimizer->lr(), run.optimizer->lr());
      train(other, 2, 4);
      expect_same_bits(run.handle->full_parameters(), other.handle->full_parameters());

      // No state is left of what was before, where the checkpoint has none.
      fsdp::load(path(name + " at its start"), *other.model, *other.optimizer);
      train(other, 0, 2);
      const auto again = other.handle->full_parameters();
      fsdp::load(path(name), *run.model, *run.optimizer);
      expect_same_bits(run.handle->full_parameters(), again);
    }
  });
}

// Whatever wrote it, and whatever reads it: the same tensors go on. Each is saved again by who has read it.
TEST_F(SaveLoad, AnyShardingReadsAnyOther) {
  struct Sharding {
    std::string name;
    int ranks;
    std::function<FullyShardOptions()> options;
  };
  const auto rows = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::rows(); };
  const std::vector<Sharding> shardings = {
      {"zero3_on_4", 4, [] { return FullyShardOptions{.mesh = line()}; }},
      {"hfsdp_on_4", 4, [] { return FullyShardOptions{.mesh = plane(), .outer_placements = Placements::optim()}; }},
      {"hsdp_on_4", 4, [] { return FullyShardOptions{.mesh = plane()}; }},
      {"zero1_on_3", 3, [] { return FullyShardOptions{.mesh = line(), .placements = Placements::optim()}; }},
      {"rows_one_unit_on_2", 2,
       [&] {
         return FullyShardOptions{
             .mesh = line(), .units = [](const std::string&, const torch::nn::Module&) { return false; }, .granularity = rows};
       }},
      {"whole_on_3", 3, [] { return FullyShardOptions{.mesh = line(), .granularity = fsdp::whole_matrices()}; }},
      {"zero0_on_1", 1, [] { return FullyShardOptions{.placements = Placements::no_shard()}; }}};
  const auto drop_rng = [](std::map<std::string, at::Tensor> tensors) {
    std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp.rng."); });
    return tensors;
  };
  for (const auto& writer : {shardings[0], shardings[1], shardings[4]}) {
    run_ranks(writer.ranks, [&] {
      Training run(writer.options());
      run.train(0, 2);
      fsdp::save(path(writer.name), *run.model, *run.optimizer);
    });
    const auto written = drop_rng(stored_tensors(path(writer.name)));
    ASSERT_EQ(written.size(), 20U * 4 + 1);  // Each parameter, its two moments and count; and a buffer.
    for (const auto& reader : shardings) {
      SCOPED_TRACE(writer.name + " to " + reader.name);
      const auto again = path(writer.name + "_" + reader.name);
      run_ranks(reader.ranks, [&] {
        Training run(reader.options(), adamw(), 12);
        const auto loaded = fsdp::load(path(writer.name), *run.model, *run.optimizer);
        EXPECT_EQ(loaded.rng, writer.ranks == reader.ranks);
        fsdp::save(again, *run.model, *run.optimizer);
      });
      expect_same_bits(drop_rng(stored_tensors(again)), written);
    }
  }
}

TEST_F(SaveLoad, ConvertsDtypes) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("fp32"), *run.model);
    Training narrow({.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .main_params_dtype = at::kBFloat16}},
                    adamw(), 12);
    fsdp::load(path("fp32"), *narrow.model);
    const auto expected = run.handle->full_parameters();
    const auto converted = narrow.handle->full_parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(converted[i].second, expected[i].second.to(at::kBFloat16))) << expected[i].first;
    }
  });
}

TEST_F(SaveLoad, PartsAndOtherNames) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("all"), *run.model, *run.optimizer);
    // The model alone.
    Training model_only({}, adamw(), 12);
    EXPECT_TRUE(fsdp::load(path("all"), *model_only.model).unexpected.empty());
    expect_same_bits(run.handle->full_parameters(), model_only.handle->full_parameters());

    // A model with something else, and without something.
    Stack shorter(fsdp::testing::StackOptions{.hidden = {13, 7, 22}});
    shorter->register_parameter("more", torch::ones({5}));
    auto sharded = fsdp::fully_shard(*shorter, {.mesh = line(), .units = stack_units()});
    const auto before = sharded.full_parameters();
    const auto refusal = message_of([&] { fsdp::load(path("all"), *shorter); });
    EXPECT_TRUE(has(refusal, "missing in the checkpoint:\n    model.more\n")) << refusal;
    EXPECT_TRUE(has(refusal, "not in the model:") && has(refusal, "model.blocks.3.down.bias") && has(refusal, "model.counts")) << refusal;
    expect_same_bits(sharded.full_parameters(), before);
    const auto loaded = fsdp::load(path("all"), *shorter, {.strict = false});
    EXPECT_EQ(loaded.missing, std::vector<std::string>{"model.more"});
    EXPECT_EQ(loaded.unexpected.size(), 5U);
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, torch::ones({5})));

    // By a map of names.
    Training renamed({}, adamw(), 12);
    const auto swap = [](const std::string& key) {
      // Two blocks of equal sizes there are not: the biases of entry and blocks' ends have one.
      if (key == "model.blocks.0.down.bias") return std::string("model.blocks.1.down.bias");
      if (key == "model.blocks.1.down.bias") return std::string("model.blocks.0.down.bias");
      return key;
    };
    fsdp::load(path("all"), *renamed.model, {.rename = swap});
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, value] : run.handle->full_parameters()) expected[name] = value;
    for (const auto& [name, value] : renamed.handle->full_parameters()) {
      EXPECT_TRUE(same_bits(value, expected.at(swap("model." + name).substr(6)))) << name;
    }
  });
}

TEST_F(SaveLoad, WhatIsWrongIsOneErrorAndChangesNothing) {
  run_ranks(2, [&](int rank) {
    Training run;
    run.train(0, 2);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    fsdp::save(path("model"), *run.model);
    Training other({}, adamw(), 12);
    other.train(0, 1);
    const auto before = other.handle->full_parameters();
    const auto mesh = line();
    const auto refusal = [&](const std::string& name) {
      const auto message = message_of([&] { fsdp::load(path(name), *other.model, *other.optimizer); });
      expect_same_bits(other.handle->full_parameters(), before);
      mesh.barrier();
      return message;
    };
    /// A copy of the checkpoint in which rank 1 has changed something; seen by all.
    const auto changed = [&](const std::string& name, const std::function<void(const fs::path&)>& change) {
      if (rank == 1) {
        fs::copy(path("1"), path(name));
        change(path(name));
      }
      mesh.barrier();
      return refusal(name);
    };
    EXPECT_TRUE(has(refusal("none"), "there is no checkpoint")) << refusal("none");
    EXPECT_TRUE(has(refusal("model"), "no state of an optimizer")) << refusal("model");
    auto message = changed("lost", [](const fs::path& step) { fs::remove(step / "__1_0.distcp"); });
    EXPECT_TRUE(has(message, "__1_0.distcp") && has(message, "No such file")) << message;
    message =
        changed("cut", [](const fs::path& step) { fs::resize_file(step / "__0_0.distcp", fs::file_size(step / "__0_0.distcp") - 1); });
    EXPECT_TRUE(has(message, "__0_0.distcp has ") && has(message, "instead of")) << message;
    message = changed("flipped", [](const fs::path& step) {
      std::fstream file(step / "__1_0.distcp", std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(2000);
      const auto byte = static_cast<char>(file.get() ^ 0x10);
      file.seekp(2000);
      file.put(byte);
    });
    EXPECT_TRUE(has(message, "__1_0.distcp has the checksum")) << message;
    message = changed("no metadata", [](const fs::path& step) { fs::remove(step / ".metadata"); });
    EXPECT_TRUE(has(message, ".metadata")) << message;

    // Another model.
    Stack wider(fsdp::testing::StackOptions{.width = 11});
    fsdp::fully_shard(*wider, {.mesh = line(), .units = stack_units()});
    message = message_of([&] { fsdp::load(path("1"), *wider); });
    EXPECT_TRUE(has(message, "'model.entry.weight' has shape [10, 3], the model's has [11, 3]")) << message;
    // Another model's optimizer.
    message = message_of([&] { fsdp::load(path("1"), *run.model, *other.optimizer); });
    EXPECT_TRUE(has(message, "belongs to another model")) << message;

    // What a failed load leaves trains on as if there had been none.
    Training untouched({}, adamw(), 12);
    untouched.train(0, 3);
    other.train(1, 3);
    expect_same_bits(other.handle->full_parameters(), untouched.handle->full_parameters());
  });
}

TEST_F(SaveLoad, AFailedSaveLeavesWhatWasThere) {
  run_ranks(2, [&](int rank) {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model);
    const auto mesh = line();
    // A file where a folder should be.
    if (rank == 0) std::ofstream(path("file")) << "x";
    mesh.barrier();
    const auto message = message_of([&] { fsdp::save(path("file/2"), *run.model); });
    EXPECT_TRUE(has(message, "could not be written") && has(message, "file")) << message;
    EXPECT_TRUE(has(message_of([&] { fsdp::save(path("2"), *run.model, {}, {.keep_last = -1}); }), "keep_last"));
    // What one rank alone refuses, all hear.
    const auto refused = message_of([&] { fsdp::save(path("2"), *run.model, {{"x", rank == 0 ? at::Tensor() : at::zeros({1})}}); });
    EXPECT_TRUE(has(refused, "rank 0: extra state 'extra.x' is an undefined tensor")) << refused;
    EXPECT_FALSE(fs::exists(path("2")));
    EXPECT_EQ(fsdp::latest(folder.path().string()), path("1"));
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 2);  // Nothing temporary is left.
  });
}

TEST_F(SaveLoad, KeepsTheLastAndReplaces) {
  run_ranks(2, [&] {
    Training run;
    for (int step = 1; step <= 4; ++step) {
      run.train(step - 1, step);
      fsdp::save(path("step-" + std::to_string(step)), *run.model, *run.optimizer, {{"step", std::int64_t{step}}}, {.keep_last = 2});
    }
    EXPECT_FALSE(fs::exists(path("step-2")));
    EXPECT_TRUE(fs::exists(path("step-3")));
    EXPECT_EQ(fsdp::latest(folder.path().string()), path("step-4"));
    const auto expected = run.handle->full_parameters();
    fsdp::save(path("step-3"), *run.model, *run.optimizer, {{"step", std::int64_t{33}}});  // Again, over the one that is there.
    Training other({}, adamw(), 12);
    const auto loaded = fsdp::load(path("step-3"), *other.model, *other.optimizer);
    EXPECT_EQ(std::get<std::int64_t>(loaded.extra.at("step")), 33);
    expect_same_bits(other.handle->full_parameters(), expected);
    EXPECT_FALSE(fsdp::latest(path("nowhere")).has_value());
  });
}

TEST_F(SaveLoad, Safetensors) {
  run_ranks(3, [&](int rank) {
    Training run;
    run.train(0, 1);
    fsdp::export_safetensors(path("one"), *run.model);
    fsdp::export_safetensors(path("many"), *run.model, {.most_bytes_per_file = 1000});
    EXPECT_TRUE(fs::exists(path("one") + "/model.safetensors"));
    EXPECT_TRUE(fs::exists(path("many") + "/model.safetensors.index.json"));
    for (const auto* name : {"one", "one/model.safetensors", "many"}) {
      Training other({.placements = Placements::optim()}, adamw(), 12);
      fsdp::load(path(name), *other.model);
      expect_same_bits(run.handle->full_parameters(), other.handle->full_parameters());
      EXPECT_TRUE(has(message_of([&] { fsdp::load(path(name), *other.model, *other.optimizer); }), "no state of an optimizer"));
    }
    fsdp::export_safetensors(path("narrow"), *run.model, {.dtype = at::kBFloat16});
    Training other({}, adamw(), 12);
    fsdp::load(path("narrow"), *other.model);
    const auto exact = run.handle->full_parameters();
    const auto rounded = other.handle->full_parameters();
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(same_bits(rounded[i].second, exact[i].second.to(at::kBFloat16).to(at::kFloat))) << exact[i].first;
    }
    const auto refusal = message_of([&] { fsdp::export_safetensors(path("none"), *run.model, {.most_bytes_per_file = 0}); });
    EXPECT_TRUE(has(refusal, "must be positive")) << refusal;
    EXPECT_FALSE(fs::exists(path("none")));
  });
}

TEST_F(SaveLoad, BesideTraining) {
  run_ranks(2, [&] {
    Training run;
    fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
    std::vector<NamedTensors> expected;
    for (int step = 1; step <= 4; ++step) {
      run.train(step - 1, step);
      expected.push_back(run.handle->full_parameters());
      saver.save(path(std::to_string(step)), {{"step", std::int64_t{step}}});
    }
    run.train(4, 6);
    saver.wait();
    for (int step = 1; step <= 4; ++step) {
      Training other({}, adamw(), 12);
      const auto loaded = fsdp::load(path(std::to_string(step)), *other.model, *other.optimizer);
      EXPECT_EQ(std::get<std::int64_t>(loaded.extra.at("step")), step);
      expect_same_bits(other.handle->full_parameters(), expected[static_cast<std::size_t>(step) - 1]);
      other.train(step, 6);
      expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    }
    // Errors come with the next call, once.
    saver.save(path("1/.metadata/2"));
    EXPECT_TRUE(has(message_of([&] { saver.save(path("5")); }), "could not be written"));
    saver.save(path("5"));
    saver.wait();
    EXPECT_EQ(fsdp::latest(folder.path().string()), path("5"));
    saver.save(path("1/.metadata/2"));
    EXPECT_TRUE(has(message_of([&] { saver.wait(); }), "could not be written"));
    saver.wait();
  });
}

TEST_F(SaveLoad, WhatIsWrittenAfterASaveBesideTrainingIsNotInIt) {
  struct Case {
    std::string name;
    FullyShardOptions options;
    bool through_shards = false;
  };
  for (const auto& [name, options, through_shards] :
       {Case{"no_shard", {.placements = Placements::no_shard()}},
        {"optim", {.placements = Placements::optim()}},
        {"optim_grads", {.placements = Placements::optim_grads()}},
        {"optim_grads_params", {}},
        {"fp64 main parameters",
         {.placements = Placements::no_shard(), .mixed_precision = fsdp::MixedPrecisionPolicy{.main_params_dtype = at::kDouble}}},
        {"offload", {.offload = fsdp::Offload::kAll}},
        {"offloaded state", {.offload = fsdp::Offload::kOptimizerState}},
        {"shards", {}, true}}) {
    SCOPED_TRACE(name);
    run_ranks(2, [&, &name = name, &options = options, through_shards = through_shards] {
      Training run(options);
      fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
      run.train(0, 2);
      const auto parameters = run.handle->full_parameters();
      const auto counts = run.model->named_buffers()["counts"].clone();
      auto mine = at::ones({3});
      const auto shards = through_shards ? run.handle->parameter_shards() : std::vector<fsdp::Shard>();
      saver.save(path(name), {{"mine", mine}});
      {
        const torch::NoGradGuard no_grad;
        for (const auto& shard : shards) shard.value.mul_(0.5);
        if (through_shards) run.handle->main_parameters_changed();
        for (auto& parameter : run.model->parameters()) parameter.mul_(0.5);
        run.model->named_buffers()["counts"].zero_();
        mine.zero_();
      }
      run.train(2, 4);
      saver.wait();

      Training other(options, adamw(), 12);
      const auto loaded = fsdp::load(path(name), *other.model, *other.optimizer);
      expect_same_bits(other.handle->full_parameters(), parameters);
      EXPECT_TRUE(same_bits(other.model->named_buffers()["counts"], counts));
      if (run.mesh.rank() == 0) {
        EXPECT_TRUE(same_bits(std::get<at::Tensor>(loaded.extra.at("mine")), at::ones({3})));
      }
      Training same(options);
      same.train(0, 4);
      other.train(2, 4);
      expect_same_bits(other.handle->full_parameters(), same.handle->full_parameters());
    });
  }
}

}  // namespace save_load_test
