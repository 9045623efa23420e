// What each lever of fully_shard costs and saves: the same training with one thing changed, all variants alive in the same ranks and taking
// turns, so that what disturbs the machine hits all of them. Prints the table of docs/use/tuning.md, which also says how to read it.

#include <c10/util/ThreadLocalDebugInfo.h>
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt.h"
#include "turns.h"

namespace {

constexpr std::int64_t kBatch = 4;
constexpr int kWarmUp = 3, kTurn = 2;

/// Counts what torch's own allocator holds for this thread: activations, temporaries, and reduced gradients.
class TensorBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*pointer*/, std::int64_t change, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device device) override {
    if (!device.is_cpu()) return;
    live_ += change;
    peak_ = std::max(peak_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  /// Above what was live at the last call, which this starts again.
  std::int64_t take_peak() {
    const auto peak = peak_;
    live_ = peak_ = 0;
    return peak;
  }

 private:
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
};

struct Lever {
  std::string name;
  fsdp::FullyShardOptions sharding = {};
  std::string optimizer = "AdamW";
  bool checkpoint = false;
  int backwards = 1;
  bool sync_each = true;
  bool two_dimensions = false;
};

std::vector<Lever> levers(int ranks) {
  using fsdp::Offload;
  using fsdp::Placements;
  const auto bf16 = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
  const auto bf16_wire = fsdp::MixedPrecisionPolicy{.grad_comm_dtype = at::kBFloat16};
  const auto float8 = std::make_shared<const fsdp::GatherFormat>(fsdp::float8_blocks());
  const auto in_float8 = [float8](const std::string&, const at::Tensor&) { return float8; };
  const auto by_blocks = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(fsdp::AdamW8bit::kBlock); };
  const auto matrices = [](const std::string& name) { return name.starts_with("blocks.") && name.find("norm") == std::string::npos; };
  std::vector<Lever> all = {
      {.name = "optim_grads_params (the base)"},
      {.name = "placements = optim_grads", .sharding = {.placements = Placements::optim_grads()}},
      {.name = "placements = optim", .sharding = {.placements = Placements::optim()}},
      {.name = "placements = no_shard", .sharding = {.placements = Placements::no_shard()}},
      {.name = "reshard_after_forward = false", .sharding = {.reshard_after_forward = false}},
      {.name = "keep_gathered_bytes = 12 MiB", .sharding = {.keep_gathered_bytes = 12 << 20}},
      {.name = "prefetch_depth = 0", .sharding = {.prefetch_depth = 0}},
      {.name = "prefetch_depth = 2", .sharding = {.prefetch_depth = 2}},
      {.name = "separate_reduce_group", .sharding = {.separate_reduce_group = true}},
      {.name = "param_dtype = bf16", .sharding = {.mixed_precision = bf16}},
      {.name = "grad_comm_dtype = bf16", .sharding = {.mixed_precision = bf16_wire}},
      {.name = "float8_blocks gathers", .sharding = {.gather_format = in_float8}},
      {.name = "offload = kOptimizerState", .sharding = {.offload = Offload::kOptimizerState}},
      {.name = "offload = kAll", .sharding = {.offload = Offload::kAll}},
      {.name = "fsdp::activation_checkpoint", .checkpoint = true},
      {.name = "two backwards, each reduced", .backwards = 2},
      {.name = "two backwards, reduced once", .backwards = 2, .sync_each = false},
      {.name = "report_nan_in_param_grad", .sharding = {.report_nan_in_param_grad = true}},
      {.name = "fsdp::AdamW8bit", .sharding = {.granularity = by_blocks}, .optimizer = "AdamW8bit"},
      {.name = "fsdp::Muon", .sharding = {.granularity = fsdp::whole_matrices(matrices)}, .optimizer = "Muon"},
  };
  if (ranks % 2 == 0 && ranks > 2) {
    all.push_back({.name = "HSDP, 2 rows", .two_dimensions = true});
    all.push_back({.name = "HFSDP, 2 rows", .sharding = {.outer_placements = Placements::optim()}, .two_dimensions = true});
    all.push_back({.name = "reshard_after_forward_size = 2", .sharding = {.reshard_after_forward_size = 2}});
  }
  return all;
}

/// A model that trains with one lever.
class Variant {
 public:
  Variant(Lever lever, const fsdp::DeviceMesh& line, const fsdp::DeviceMesh& plane, std::int64_t context)
      : lever_(std::move(lever)), context_(context), model_(nullptr) {
    torch::manual_seed(1);
    model_ = GPT(GPTConfig{.vocab = 4096, .dim = 256, .layers = 8, .heads = 8, .context = context, .checkpoint = lever_.checkpoint});
    auto sharding = lever_.sharding;
    sharding.mesh = lever_.two_dimensions ? plane : line;
    sharding.units = fsdp::each<GPTBlockImpl>();
    handle_ = std::make_unique<fsdp::FSDPModule>(fsdp::fully_shard(*model_, sharding));
    if (lever_.optimizer == "Muon") {
      optimizer_ = std::make_unique<fsdp::Muon>(*model_, fsdp::MuonOptions{.lr = 3e-4});
    } else if (lever_.optimizer == "AdamW8bit") {
      optimizer_ = std::make_unique<fsdp::AdamW8bit>(*model_, fsdp::AdamW8bitOptions{.lr = 3e-4});
    } else {
      optimizer_ = std::make_unique<fsdp::AdamW>(*model_, fsdp::AdamWOptions{.lr = 3e-4});
    }
  }

  const std::string& name() const { return lever_.name; }

  /// Milliseconds of a step over kBatch sequences, on this rank.
  double step(const fsdp::DeviceMesh& mesh, std::int64_t number) {
    const auto tokens = ((at::arange(kBatch * (context_ + 1)) + number * 7919 + mesh.rank() * 104'729) * 48'271).remainder(4096);
    const auto rows = tokens.view({kBatch, context_ + 1});
    mesh.barrier();
    const auto begin = std::chrono::steady_clock::now();
    const auto at_once = kBatch / lever_.backwards;
    for (int part = 0; part < lever_.backwards; ++part) {
      handle_->set_requires_gradient_sync(lever_.sync_each || part + 1 == lever_.backwards);
      const auto some = rows.narrow(0, part * at_once, at_once);
      const auto loss = model_->loss(some.narrow(1, 0, context_).contiguous(), some.narrow(1, 1, context_).contiguous());
      (loss / static_cast<double>(lever_.backwards)).backward();
    }
    const auto update_begin = std::chrono::steady_clock::now();
    optimizer_->step();
    const auto end = std::chrono::steady_clock::now();
    optimizer_->zero_grad();
    update_ms_ = std::chrono::duration<double, std::milli>(end - update_begin).count();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

  /// Of the last step.
  double update_ms() const { return update_ms_; }
  fsdp::FSDPModule& handle() { return *handle_; }

 private:
  Lever lever_;
  std::int64_t context_;
  GPT model_;
  std::unique_ptr<fsdp::FSDPModule> handle_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  double update_ms_ = 0;
};

struct Result {
  std::vector<double> step_ms;    ///< Of each round, the slowest rank's.
  std::vector<double> update_ms;  ///< Of the optimizer alone.
  double tensors_mib = 0;
  fsdp::WireStats wire;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The slowest rank's.
double slowest(const fsdp::DeviceMesh& mesh, double value) {
  double largest = 0;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) largest = std::max(largest, mesh.sum(mesh.rank() == rank ? value : 0.0));
  return largest;
}

void print(const std::vector<std::unique_ptr<Variant>>& variants, const std::vector<Result>& results) {
  constexpr double kMiB = 1 << 20;
  std::printf("| option | step, x of the base | update, ms | engine peak | host | tensors' peak | gathered | reduced |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  for (std::size_t v = 0; v < variants.size(); ++v) {
    std::vector<double> ratios;
    for (std::size_t round = 0; round < results[v].step_ms.size(); ++round) {
      ratios.push_back(results[v].step_ms[round] / results[0].step_ms[round]);
    }
    const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
    const auto memory = variants[v]->handle().memory_stats();
    std::printf("| `%s` | %.2f (%.2f to %.2f) | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", variants[v]->name().c_str(), median(ratios),
                *low, *high, median(results[v].update_ms), static_cast<double>(memory.total.peak) / kMiB,
                static_cast<double>(memory.host.peak) / kMiB, results[v].tensors_mib,
                static_cast<double>(results[v].wire.all_gather_bytes) / kMiB,
                static_cast<double>(results[v].wire.reduce_scatter_bytes) / kMiB);
  }
}

int run(int rounds, std::int64_t context) {
  at::set_num_threads(1);
  const auto line = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  const auto plane = fsdp::init_device_mesh("cpu", {{"dp_outer", line.size() % 2 == 0 ? 2 : 1}, {"dp_shard", -1}});
  const auto bytes = std::make_shared<TensorBytes>();
  const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
  std::vector<std::unique_ptr<Variant>> variants;
  for (auto& lever : levers(static_cast<int>(line.size()))) {
    variants.push_back(std::make_unique<Variant>(std::move(lever), line, plane, context));
  }
  std::vector<Result> results(variants.size());
  std::int64_t number = 0;
  for (int i = 0; i < kWarmUp; ++i) {
    for (auto& variant : variants) variant->step(line, number);
    ++number;
  }
  for (std::size_t v = 0; v < variants.size(); ++v) {
    variants[v]->handle().reset_wire_stats();
    bytes->take_peak();
    variants[v]->step(line, number);
    results[v].tensors_mib = static_cast<double>(bytes->take_peak()) / (1 << 20);
    results[v].wire = variants[v]->handle().wire_stats();
  }
  for (int round = 0; round < rounds; ++round) {
    ++number;
    for (std::size_t turn = 0; turn < variants.size(); ++turn) {
      const auto v = (turn + static_cast<std::size_t>(round)) % variants.size();  // another order in each round
      std::vector<double> steps;
      for (int i = 0; i < kTurn; ++i) steps.push_back(slowest(line, variants[v]->step(line, number)));
      results[v].step_ms.push_back(*std::min_element(steps.begin(), steps.end()));
      results[v].update_ms.push_back(slowest(line, variants[v]->update_ms()));
    }
  }
  if (line.rank() == 0) print(variants, results);
  line.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // Shorter sequences leave a rank less to compute while parameters and gradients travel.
  const bool has_context = argc > 3;
  const auto turns = fsdp::bench::read_turns("bench_levers", has_context ? 3 : argc, argv, {.ranks = 2, .rounds = 10});
  if (!turns) return 2;
  const std::int64_t context = has_context ? std::atoll(argv[3]) : 128;
  if (argc > 4 || context < 1) {
    std::fprintf(stderr, "usage: bench_levers [RANKS] [ROUNDS] [CONTEXT]\n");
    return 2;
  }
  return fsdp::launch_local(turns->ranks, [&] { return run(turns->rounds, context); });
}
