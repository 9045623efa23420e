// Models whose parameters are tensor-parallel pieces already: sharded once more, while checkpoints and norms are of the wholes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/error.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stored.h"
#include "support/temporary_folder.h"

namespace tensor_parallel_test {

using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stored_tensors;

constexpr std::int64_t kIn = 6, kHidden = 10, kOut = 4;
const std::string kRow = "tp";

/// y = the sum over the mesh's ranks; each rank's loss is the same, so its gradient is everybody's.
struct SumOverPieces : torch::autograd::Function<SumOverPieces> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const fsdp::DeviceMesh& mesh) {
    return mesh.communicator(kRow)->exchange(x.contiguous(), {.operation = "sum of pieces", .unit = "(test)"}).sum(0);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// Two layers whose hidden units [begin, end) are here: the first cut by rows, the second by columns, as Megatron-LM does.
struct MLPImpl : torch::nn::Module {
  MLPImpl(std::int64_t begin, std::int64_t end, fsdp::DeviceMesh mesh_) : mesh(std::move(mesh_)) {
    torch::manual_seed(3);
    const auto slice = [&](const at::Tensor& whole, std::int64_t dim) { return whole.narrow(dim, begin, end - begin).clone(); };
    up = register_parameter("up", slice(torch::randn({kHidden, kIn}), 0));
    up_bias = register_parameter("up_bias", slice(torch::randn({kHidden}), 0));
    down = register_parameter("down", slice(torch::randn({kOut, kHidden}), 1));
    down_bias = register_parameter("down_bias", torch::randn({kOut}));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::linear(torch::tanh(torch::linear(x, up, up_bias)), down);
    if (mesh.defined()) y = SumOverPieces::apply(y, mesh);
    return y + down_bias;
  }
  fsdp::DeviceMesh mesh;
  at::Tensor up, up_bias, down, down_bias;
};
TORCH_MODULE(MLP);

at::Tensor loss_of(MLP& model, std::int64_t data_rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(data_rank + 1));
  return model->forward(at::randn({5, kIn}, generator)).square().mean();
}

std::optional<std::int64_t> cut_dim(const std::string& name) {
  if (name == "down_bias") return std::nullopt;
  return name == "down" ? 1 : 0;
}

/// The pieces of `first` and kHidden - first hidden units, sharded over the grid's other dimension.
struct Pieces {
  Pieces(const fsdp::DeviceMesh& grid, std::int64_t first, const fsdp::FullyShardOptions& more = {}) : model(nullptr) {
    const auto mesh = grid[kRow];
    const bool is_first = mesh.coordinate(kRow) == 0;
    model = MLP(is_first ? 0 : first, is_first ? first : kHidden, mesh);
    auto options = more;
    options.mesh = grid["dp_shard"];
    options.tensor_parallel = [mesh](const std::string& name, const at::Tensor&) -> std::optional<fsdp::TensorParallel> {
      const auto dim = cut_dim(name);
      return dim ? std::optional(fsdp::TensorParallel{mesh, *dim}) : std::nullopt;
    };
    handle = std::make_unique<fsdp::FSDPModule>(fsdp::fully_shard(*model, options));
    optimizer = std::make_unique<fsdp::AdamW>(*model, fsdp::AdamWOptions{.lr = 1e-2});
  }
  MLP model;
  std::unique_ptr<fsdp::FSDPModule> handle;
  std::unique_ptr<fsdp::AdamW> optimizer;
};

fsdp::DeviceMesh grid_of(std::int64_t pieces) { return fsdp::init_device_mesh("cpu", {{kRow, pieces}, {"dp_shard", -1}}); }

class TensorParallel : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

TEST_F(TensorParallel, GradientsNormsAndCheckpointsAreOfTheWhole) {
  // The reference: the whole model in one process, without the library.
  MLP reference(0, kHidden, fsdp::DeviceMesh());
  for (int rank = 0; rank < 2; ++rank) (loss_of(reference, rank) / 2).backward();
  std::map<std::string, at::Tensor> gradients;
  double squares = 0;
  for (const auto& item : reference->named_parameters()) {
    gradients[item.key()] = item.value().grad();
    squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(squares);

  const std::vector<fsdp::FullyShardOptions> shardings = {
      {}, {.placements = fsdp::Placements::optim()}, {.granularity = [](const std::string&, const at::Tensor&) {
        return fsdp::Granularity::rows();
      }}};
  for (std::size_t s = 0; s < shardings.size(); ++s) {
    run_ranks(4, [&] {
      const auto grid = grid_of(2);
      const std::int64_t first = 7;
      Pieces run(grid, first, shardings[s]);
      loss_of(run.model, grid.coordinate("dp_shard")).backward();
      const bool is_first = grid.coordinate(kRow) == 0;
      for (const auto& shard : run.handle->gradient_shards()) {
        EXPECT_EQ(shard.global_shape, gradients.at(shard.name).sizes().vec()) << shard.name;
        const auto dim = cut_dim(shard.name);
        auto piece = gradients.at(shard.name);
        if (dim) {
          EXPECT_EQ(shard.global_offset[static_cast<std::size_t>(*dim)], is_first ? 0 : first) << shard.name;
          piece = piece.narrow(*dim, is_first ? 0 : first, is_first ? first : kHidden - first);
        }
        EXPECT_EQ(shard.shape, piece.sizes().vec()) << shard.name;
        EXPECT_TRUE(torch::allclose(shard.value, piece.reshape({-1}).narrow(0, shard.offset, shard.value.numel()), 1e-5, 1e-6))
            << shard.name;
      }
      for (const auto& [name, value] : fsdp::gradient_norms(*run.model)) {
        EXPECT_NEAR(value, gradients.at(name).norm().item<double>(), 1e-5) << name;
      }
      EXPECT_NEAR(fsdp::clip_grad_norm(*run.model, 1e6), norm, 1e-5);
      run.optimizer->step();
      fsdp::save(path("whole" + std::to_string(s)), *run.model, *run.optimizer);
      fsdp::export_safetensors(path("exported" + std::to_string(s)), *run.model);
    });
    const auto written = stored_tensors(path("whole" + std::to_string(s)));
    for (const auto& [name, gradient] : gradients) {
      EXPECT_EQ(written.at("model." + name).sizes(), gradient.sizes()) << name;
      const auto expected = gradient * 0.1F;  // Adam's first average.
      EXPECT_TRUE(torch::allclose(written.at("optim.state." + name + ".exp_avg"), expected, 1e-4, 1e-7)) << name;
    }
    const auto of_model = [](std::map<std::string, at::Tensor> tensors) {
      std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp."); });
      return tensors;
    };
    // Into pieces of other sizes, and into a model that is not tensor-parallel.
    run_ranks(2, [&] {
      Pieces other(grid_of(2), 4);
      fsdp::load(path("whole" + std::to_string(s)), *other.model, *other.optimizer);
      fsdp::save(path("again" + std::to_string(s)), *other.model, *other.optimizer);
      MLP whole(0, kHidden, fsdp::DeviceMesh());
      auto sharded = fsdp::fully_shard(*whole);
      fsdp::load(path("exported" + std::to_string(s)), *whole);
      for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(same_bits(value, written.at("model." + name))) << name;
      fsdp::AdamW optimizer(*whole, {.lr = 1e-2});
      fsdp::load(path("whole" + std::to_string(s)), *whole, optimizer);
      fsdp::save(path("flat" + std::to_string(s)), *whole, optimizer);
    });
    for (const auto* name : {"again", "flat"}) {
      const auto tensors = of_model(stored_tensors(path(name + std::to_string(s))));
      ASSERT_EQ(tensors.size(), of_model(written).size());
      for (const auto& [key, tensor] : of_model(written)) EXPECT_TRUE(same_bits(tensor, tensors.at(key))) << name << ": " << key;
    }
  }
}

TEST_F(TensorParallel, LossScalingIsAgreedOverPieces) {
  run_ranks(2, [](int rank) {
    Pieces run(grid_of(2), 5);
    fsdp::GradScaler scaler({.init_scale = 4});
    const auto before = run.handle->full_parameters();
    auto loss = loss_of(run.model, 0);
    // Only the first piece's gradients overflow.
    loss = loss + run.model->up.sum() * (rank == 0 ? std::numeric_limits<double>::infinity() : 0.0);
    scaler.scale(loss).backward();
    EXPECT_FALSE(scaler.step(*run.optimizer));
    scaler.update();
    const auto after = run.handle->full_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i].second, after[i].second)) << before[i].first;
  });
}

TEST_F(TensorParallel, RefusesWhatMakesNoWhole) {
  run_ranks(2, [](int rank) {
    const auto grid = grid_of(2);
    const auto refusal = [&](const std::function<std::optional<fsdp::TensorParallel>(const std::string&, const at::Tensor&)>& pieces) {
      MLP model(0, 5, fsdp::DeviceMesh());
      return message_of([&] { fsdp::fully_shard(*model, {.mesh = grid["dp_shard"], .tensor_parallel = pieces}); });
    };
    auto message = refusal([&](const std::string&, const at::Tensor&) { return fsdp::TensorParallel{grid, 0}; });
    EXPECT_TRUE(has(message, "needs a mesh of one dimension")) << message;
    message = refusal([&](const std::string&, const at::Tensor&) { return fsdp::TensorParallel{grid[kRow], 1}; });
    EXPECT_TRUE(has(message, "'up_bias' has no dimension 1")) << message;
    message = refusal([&](const std::string& name, const at::Tensor&) {
      return fsdp::TensorParallel{name == "up" ? grid[kRow] : grid["dp_shard"], 0};
    });
    EXPECT_TRUE(has(message, "is on another mesh")) << message;
    EXPECT_EQ(refusal([&](const std::string&, const at::Tensor&) { return fsdp::TensorParallel{grid[kRow], 0}; }), "no error") << rank;
  });
}

// The pieces of a matrix made orthogonal one by one are not the matrix made orthogonal.
TEST_F(TensorParallel, MuonRefusesPiecesOfMatrices) {
  run_ranks(4, [] {
    for (const std::int64_t pieces : {2, 1}) {
      Pieces run(grid_of(pieces), pieces == 1 ? kHidden : 7, {.granularity = fsdp::whole_matrices()});
      const auto refusal = message_of([&] { fsdp::Muon muon(*run.model); });
      if (pieces == 1) {
        EXPECT_EQ(refusal, "no error");  // all of each matrix
      } else {
        EXPECT_TRUE(has(refusal, "Muon: parameter 'up' of unit '(root)' is a tensor-parallel piece of a matrix") &&
                    has(refusal, "MuonOptions::matrices"))
            << refusal;
      }
      const auto none = [](const std::string&) { return false; };
      EXPECT_EQ(message_of([&] { fsdp::Muon muon(*run.model, {.matrices = none}); }), "no error");
    }
  });
}

}  // namespace tensor_parallel_test
