#include "fsdp/local_shards.h"

#include <algorithm>
#include <cstddef>
#include <thread>
#include <utility>

#include "checkpoint/boxes.h"
#include "engine/engine.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {
namespace {

LocalShard shard_of(const engine::Unit& unit, std::size_t i) {
  const auto& parameter = unit.parameters[i];
  const auto slice = unit.main_slice(i);
  const auto& part = unit.main.parts[slice.sub_buffer];
  LocalShard shard{.name = parameter.name, .dtype = part.scalar_type(), .shape = parameter.global_shape, .boxes = {}};
  auto begin = slice.offset;
  for (auto& box : ckpt::boxes_of_slice({parameter.global_offset, parameter.shape}, slice.parameter_offset, slice.numel)) {
    const auto numel = ckpt::numel(box.sizes);
    const auto tensor = part.narrow(0, begin, numel).view(box.sizes);
    shard.boxes.push_back({.offsets = std::move(box.offsets), .sizes = std::move(box.sizes), .tensor = tensor});
    begin += numel;
  }
  return shard;
}

}  // namespace

LocalShards local_shards(torch::nn::Module& module) {
  auto engine = handle(module).engine();
  std::vector<std::pair<std::size_t, LocalShard>> ordered;
  for (const auto& unit : engine->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) ordered.emplace_back(unit->parameters[i].position, shard_of(*unit, i));
  }
  std::ranges::sort(ordered, {}, [](const auto& shard) { return shard.first; });
  std::vector<LocalShard> shards;
  for (auto& [position, shard] : ordered) shards.push_back(std::move(shard));
  return {std::move(engine), std::move(shards)};
}

LocalShards::LocalShards(std::shared_ptr<engine::Engine> engine, std::vector<LocalShard> shards)
    : engine_(std::move(engine)), shards_(std::move(shards)) {}

bool LocalShards::is_valid() const { return !engine_->main().is_retired(); }

ReadingGuard LocalShards::reading() const { return ReadingGuard(*engine_); }

ReadingGuard::ReadingGuard(engine::Engine& engine) {
  engine.main().flush_writes();
  engine.main().set_reader(ended_.get_future(), std::this_thread::get_id());
}

ReadingGuard::~ReadingGuard() { ended_.set_value(); }

}  // namespace fsdp
