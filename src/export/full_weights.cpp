#include "fsdp/full_weights.h"

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "export/weight_stream.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {
namespace {

/// The parameters in the order of named_parameters(), and the buffers.
std::vector<weights::Entry> entries_of(const torch::nn::Module& module, const engine::Engine& engine) {
  std::vector<std::pair<std::size_t, weights::Entry>> ordered;
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      if (parameter.tensor_parallel) {
        throw Error("full_weights: parameter '" + parameter.name +
                    "' is a tensor-parallel piece, of which other ranks have the rest; save a checkpoint, which puts pieces together");
      }
      const auto slice = unit->main_slice(i);
      ordered.emplace_back(parameter.position,
                           weights::Entry{.names = {parameter.name},
                                          .shape = parameter.shape,
                                          .own = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                                          .unit = unit.get(),
                                          .parameter = i});
    }
  }
  std::ranges::sort(ordered, {}, [](const auto& entry) { return entry.first; });
  std::vector<weights::Entry> entries;
  for (auto& [position, entry] : ordered) entries.push_back(std::move(entry));
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined())
      entries.push_back({.names = {buffer.key()}, .shape = buffer.value().sizes().vec(), .own = buffer.value()});
  }
  return entries;
}

}  // namespace

FullWeights full_weights(torch::nn::Module& module, FullWeightsOptions options) {
  weights::Request request{.engines = {handle(module).engine()}, .entries = {}, .options = std::move(options), .problem = {}};
  auto& engine = *request.engines.front();
  try {
    engine.main().flush_writes();
    request.entries = entries_of(module, engine);
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    request.problem = error.what();
  }
  return FullWeights(std::make_unique<weights::WeightStream>(std::move(request)));
}

WeightSnapshot::WeightSnapshot(std::optional<at::Device> device) : saved_(std::make_unique<weights::SavedWeights>()) {
  saved_->device = device;
}
WeightSnapshot::~WeightSnapshot() = default;

std::int64_t WeightSnapshot::nbytes() const {
  std::int64_t bytes = 0;
  for (const auto& shard : saved_->shards) bytes += shard.defined() ? static_cast<std::int64_t>(shard.nbytes()) : 0;
  return bytes;
}

FullWeights::FullWeights(std::unique_ptr<weights::WeightStream> stream) : stream_(std::move(stream)) {}
FullWeights::FullWeights(FullWeights&&) noexcept = default;
FullWeights::~FullWeights() = default;

FullWeights::iterator& FullWeights::iterator::operator++() {
  range_->bucket_.reset();
  range_->bucket_ = range_->stream_->next();
  if (!range_->bucket_) range_ = nullptr;
  return *this;
}

void FullWeights::close() {
  bucket_.reset();
  stream_->close();
}

std::size_t FullWeights::size() const { return stream_->buckets(); }

double FullWeights::changed_fraction() const { return stream_->changed_fraction(); }

}  // namespace fsdp
