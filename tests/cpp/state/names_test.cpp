// Checkpoints whose names other programs chose: torchtitan's, transformers' and Megatron-FSDP's, and parts of models.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fsdp/error.h"
#include "fsdp/megatron_names.h"
#include "fsdp/save_load.h"
#include "support/edited_checkpoint.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "support/training.h"
#include "test_paths.h"

namespace names_test {

namespace fs = std::filesystem;

using fsdp::testing::adamw;
using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stored_tensors;
using fsdp::testing::Training;

class Names : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

/// What a training holds, as it would be saved.
std::map<std::string, at::Tensor> saved(Training& run, const std::string& path) {
  fsdp::save(path, *run.model, *run.optimizer);
  run.mesh.barrier();
  auto tensors = stored_tensors(path);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp."); });
  return tensors;
}

// As the programs themselves write it, from FSDP2.
TEST_F(Names, CheckpointsOfOtherProgramsAreLoaded) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 2);
    fsdp::save(path("ours"), *run.model, *run.optimizer);
  });
  fsdp::testing::run_peer(fsdp::testing::kStatePeer, {"programs", path("ours"), path("programs")}, 2);
  const auto of_titan = [](const std::string& name) {
    return name.starts_with("train_state.") || name.starts_with("lr_scheduler.") || name.starts_with("dataloader.");
  };
  run_ranks(3, [&] {
    Training ours({}, adamw(), 12);
    fsdp::load(path("ours"), *ours.model, *ours.optimizer);
    const auto expected = saved(ours, path("expected"));

    Training titan({}, adamw(), 13);
    fsdp::load(path("programs/titan"), *titan.model, *titan.optimizer,
               {.model_prefix = "", .optimizer_prefix = "optimizer.", .ignore = of_titan});
    expect_same_bits(saved(titan, path("titan")), expected);
    const auto message = message_of([&] {
      fsdp::load(path("programs/titan"), *titan.model, *titan.optimizer, {.model_prefix = "", .optimizer_prefix = "optimizer."});
    });
    EXPECT_TRUE(has(message, "not in the model:\n    train_state.step\n")) << message;

    // accelerate's and transformers' Trainer: two folders.
    Training trainer({}, adamw(), 14);
    fsdp::load(path("programs/trainer/pytorch_model_fsdp_0"), *trainer.model);
    fsdp::load(path("programs/trainer/optimizer_0"), *trainer.model, *trainer.optimizer,
               {.optimizer_prefix = "optimizer.", .ignore = [](const std::string& name) { return name.starts_with("model."); }});
    expect_same_bits(saved(trainer, path("trainer")), expected);

    // Megatron-FSDP's programs number the optimizer's parameters.
    Training megatron({}, adamw(), 15);
    fsdp::load(path("programs/megatron"), *megatron.model, *megatron.optimizer, fsdp::megatron_names(*megatron.model));
    expect_same_bits(saved(megatron, path("megatron")), expected);
    Training alone({}, adamw(), 16);
    fsdp::load(path("programs/megatron"), *alone.model, fsdp::megatron_names(*alone.model));
    expect_same_bits(alone.handle->full_parameters(), ours.handle->full_parameters());
    const std::vector<std::string> few = {"entry.weight", "entry.bias"};
    const auto unnumbered =
        message_of([&] { fsdp::load(path("programs/megatron"), *megatron.model, *megatron.optimizer, fsdp::megatron_names(few)); });
    EXPECT_TRUE(has(unnumbered, "optim.state.head.weight.step")) << unnumbered;
  });
  EXPECT_TRUE(has(message_of([] { fsdp::megatron_names({"a", "b", "a"}); }), "'a' is listed twice"));
}

// The library's own names are none of the model's: a table of the model's need not have them.
TEST_F(Names, RenameIsAskedForTheModelsAndTheOptimizersOnly) {
  run_ranks(2, [&](int rank) {
    const fsdp::GradScaler scaler({.init_scale = 8});
    Training run;
    run.train(0, 1);
    run.optimizer->set_lr_factor(0.5);
    fsdp::save(path("1"), *run.model, *run.optimizer, {{"step", std::int64_t{1}}},
               {.metric = 3.5, .rank_extra = {{"position", std::int64_t{rank}}}, .grad_scaler = &scaler});
    const auto rename = [](const std::string& key) {
      EXPECT_TRUE(key.starts_with("model.") || key.starts_with("optim.")) << key;
      return key.starts_with("model.") || key.starts_with("optim.") ? key : "not there";
    };
    fsdp::GradScaler other_scaler;
    Training other({}, adamw(), 12);
    const auto loaded = fsdp::load(path("1"), *other.model, *other.optimizer, {.rename = rename, .grad_scaler = &other_scaler});
    EXPECT_EQ(loaded.metric, 3.5);
    EXPECT_EQ(std::get<std::int64_t>(loaded.rank_extra.at("position")), rank);
    EXPECT_EQ(other.optimizer->lr(), run.optimizer->lr());
    EXPECT_EQ(other_scaler.get_scale(), 8);
    EXPECT_TRUE(loaded.rng);
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
  });
}

TEST_F(Names, ThePrefixesThatAreThereAreNamed) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("a"), *run.model, *run.optimizer);
    const auto of_model = message_of([&] { fsdp::load(path("a"), *run.model, {.model_prefix = "m."}); });
    EXPECT_TRUE(has(of_model, "does not fit the model; it has this below 'model.': pass model_prefix")) << of_model;
    const auto of_optimizer = message_of([&] { fsdp::load(path("a"), *run.model, *run.optimizer, {.optimizer_prefix = "o."}); });
    EXPECT_TRUE(has(of_optimizer, "has no state of an optimizer below 'o.'; it has this below 'optim.': pass optimizer_prefix"))
        << of_optimizer;
    fsdp::save(path("alone"), *run.model);
    const auto alone = message_of([&] { fsdp::load(path("alone"), *run.model, *run.optimizer); });
    EXPECT_TRUE(has(alone, "has no state of an optimizer below 'optim.'; load the model alone, or turn strict off")) << alone;
  });
}

TEST_F(Names, AreIgnoredOneByOne) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model, *run.optimizer, {{"mine", std::int64_t{1}}});
    Training other({}, adamw(), 12);
    other.train(0, 2);
    std::map<std::string, at::Tensor> before;
    for (const auto& [name, value] : other.handle->full_parameters()) before[name] = value;
    const auto is_head = [](const std::string& name) { return has(name, "head.") || name == "extra.mine"; };
    const auto loaded = fsdp::load(path("1"), *other.model, *other.optimizer, {.ignore = is_head});
    EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty() && loaded.extra.empty());
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, value] : run.handle->full_parameters()) expected[name] = value;
    for (const auto& [name, value] : other.handle->full_parameters()) {
      EXPECT_TRUE(same_bits(value, (is_head(name) ? before : expected).at(name))) << name;
    }
    const auto state = saved(other, path("2"));
    EXPECT_EQ(state.at("optim.state.head.weight.step").item<float>(), 2);
    EXPECT_EQ(state.at("optim.state.entry.weight.step").item<float>(), 1);
    // A model without what is ignored.
    fsdp::testing::Stack shorter(fsdp::testing::StackOptions{.hidden = {13, 7, 22}});
    shorter->register_buffer("counts", torch::zeros({3, 2}));
    fsdp::fully_shard(*shorter, {.mesh = fsdp::testing::line(), .units = fsdp::testing::stack_units()});
    fsdp::load(path("1"), *shorter, {.ignore = [](const std::string& name) { return has(name, "blocks.3."); }});
  });
}

// What transformers downloads: an index, of which a part is there and a part is wanted.
TEST_F(Names, AnIndexMayHaveMoreThanIsAskedFor) {
  run_ranks(2, [&](int rank) {
    Training run;
    run.train(0, 1);
    fsdp::export_safetensors(path("all"), *run.model, {.most_bytes_per_file = 700});
    std::string gone;
    for (const auto& file : fsdp::ckpt::read_safetensors(path("all"))) {
      for (const auto& tensor : file.tensors) {
        if (tensor.name == "head.weight") gone = file.name;
      }
    }
    std::vector<std::string> lost;
    for (const auto& file : fsdp::ckpt::read_safetensors(path("all"))) {
      for (const auto& tensor : file.tensors) {
        if (file.name == gone) lost.push_back("model." + tensor.name);
      }
    }
    run.mesh.barrier();
    if (rank == 0) fs::remove(path("all") + "/" + gone);
    run.mesh.barrier();
    Training other({}, adamw(), 12);
    const auto message = message_of([&] { fsdp::load(path("all"), *other.model); });
    EXPECT_TRUE(has(message, "is in " + gone + ", which is not there; download it, too")) << message;
    const auto is_lost = [&](const std::string& name) { return std::find(lost.begin(), lost.end(), name) != lost.end(); };
    fsdp::load(path("all"), *other.model, {.ignore = is_lost});
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, value] : run.handle->full_parameters()) expected[name] = value;
    for (const auto& [name, value] : other.handle->full_parameters()) {
      if (!is_lost("model." + name)) {
        EXPECT_TRUE(same_bits(value, expected.at(name))) << name;
      }
    }
  });
}

TEST_F(Names, APathMayEndWithASlash) {
  run_ranks(2, [&] {
    Training run;
    for (int step = 1; step <= 3; ++step)
      fsdp::save(path("run/step-" + std::to_string(step)) + "/", *run.model, *run.optimizer, {}, {.keep_last = 2});
    EXPECT_FALSE(fs::exists(path("run/step-1")));
    EXPECT_TRUE(fs::exists(path("run/step-2/.metadata")) && fs::exists(path("run/step-3/.metadata")));
    EXPECT_EQ(std::distance(fs::directory_iterator(path("run")), fs::directory_iterator()), 2);
    Training other({}, adamw(), 12);
    fsdp::load(path("run/step-3") + "/", *other.model, *other.optimizer);
    ASSERT_TRUE(fsdp::load_latest(path("run") + "/", *other.model, *other.optimizer).has_value());
    expect_same_bits(other.handle->full_parameters(), run.handle->full_parameters());
    fsdp::export_safetensors(path("export") + "/", *run.model);
    fsdp::load(path("export") + "/", *other.model);
  });
}

}  // namespace names_test
