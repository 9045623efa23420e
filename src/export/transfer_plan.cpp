#include "fsdp/transfer_plan.h"

#include <exception>

#include "base/exception_text.h"
#include "export/planned_transfer.h"
#include "fsdp/error.h"
#include "fsdp/full_weights.h"
#include "fsdp/local_shards.h"

namespace fsdp {
namespace {

/// The shards' boxes and the buffers, with their values of now.
std::vector<weights::HeldValues> held_of(const LocalShards& shards, const std::vector<std::pair<std::string, at::Tensor>>& buffers) {
  std::vector<weights::HeldValues> held;
  for (const auto& shard : shards.shards()) {
    for (const auto& box : shard.boxes) {
      if (box.tensor.numel() == 0) continue;
      held.push_back({.held = {.name = shard.name, .shape = shard.shape, .dtype = shard.dtype, .box = {box.offsets, box.sizes}},
                      .values = box.tensor});
    }
  }
  for (const auto& [name, buffer] : buffers) {
    if (buffer.numel() == 0) continue;
    const auto shape = buffer.sizes().vec();
    held.push_back({.held = {.name = name, .shape = shape, .dtype = buffer.scalar_type(), .box = ckpt::whole(shape)}, .values = buffer});
  }
  return held;
}

}  // namespace

/// The model of a rank that trains; nothing on others.
struct TransferPlan::Source {
  std::optional<LocalShards> shards;
  std::vector<std::pair<std::string, at::Tensor>> buffers;

  explicit Source(torch::nn::Module* module) {
    if (module == nullptr) return;
    shards.emplace(local_shards(*module));
    for (const auto& buffer : module->named_buffers()) {
      if (buffer.value().defined()) buffers.emplace_back(buffer.key(), buffer.value());
    }
  }

  std::vector<weights::HeldValues> held() const { return shards ? held_of(*shards, buffers) : std::vector<weights::HeldValues>(); }
};

TransferPlan::TransferPlan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options)
    : timeout_(options.timeout) {
  weights::TransferSide side;
  try {
    if (timeout_.count() <= 0) throw Error("timeout must be positive, got " + std::to_string(timeout_.count()) + " ms");
    source_ = std::make_unique<Source>(module);
    side.held = source_->held();
    for (const auto& wanted : options.wanted) {
      side.targets.push_back(weights::target_of(wanted.name, wanted.into, wanted.offsets, wanted.dtype));
    }
  } catch (const std::exception&) {  // Of any kind: the others wait for this rank.
    side.problem = current_exception_text();
  }
  const weights::TransferSettings settings = {.receivers = options.receivers,
                                              .message_bytes = options.message_bytes,
                                              .timeout = timeout_.count() > 0 ? timeout_ : TransferOptions().timeout};
  transfer_ = std::make_unique<weights::PlannedTransfer>(group.peers(), std::move(side), settings);
}

TransferPlan::~TransferPlan() = default;
TransferPlan::TransferPlan(TransferPlan&&) noexcept = default;

void TransferPlan::run() { run(nullptr); }

void TransferPlan::run(WeightSnapshot& since) { run(&since); }

void TransferPlan::run(WeightSnapshot* since) {
  std::string problem;
  std::unique_ptr<ReadingGuard> reading;
  try {
    if (source_->shards) {
      if (!source_->shards->is_valid()) throw Error("the model was made ordinary again: make a new plan");
      reading.reset(new ReadingGuard(source_->shards->reading()));
    }
  } catch (const std::exception&) {
    problem = current_exception_text();
  }
  transfer_->run(source_->held(), std::move(problem), timeout_, since == nullptr ? nullptr : &since->saved());
}

std::int64_t TransferPlan::travelled_bytes() const { return transfer_->travelled_bytes(); }

std::map<std::pair<int, int>, std::int64_t> TransferPlan::bytes_sent() const { return weights::bytes_of_pairs(transfer_->plan()); }

std::vector<TransferMessage> TransferPlan::messages() const { return transfer_->messages(); }

std::int64_t TransferPlan::rounds() const { return transfer_->plan().rounds; }

std::int64_t TransferPlan::largest_bytes() const { return transfer_->plan().largest_bytes; }

TransferPlan transfer_plan(torch::nn::Module* module, const TransferGroup& group, const TransferOptions& options) {
  return {module, group, options};
}

}  // namespace fsdp
