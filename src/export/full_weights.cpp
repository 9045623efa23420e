#include "fsdp/full_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "export/assembly.h"
#include "export/chosen_entries.h"
#include "export/weight_stream.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {
namespace {

using Assemblies = std::map<const engine::UnitParameter*, std::shared_ptr<const weights::Assembly>>;

/// How tensor-parallel parameters are put together. Collective over the ranks that have pieces.
Assemblies assemblies_of(engine::Engine& engine) {
  const auto& mesh = engine.options().tensor_parallel;
  if (!mesh.defined()) return {};
  std::vector<const engine::UnitParameter*> cut;
  std::vector<std::int64_t> places;  // shape and offset of each piece
  for (const auto& unit : engine.units()) {
    for (const auto& parameter : unit->parameters) {
      if (!parameter.tensor_parallel) continue;
      cut.push_back(&parameter);
      places.insert(places.end(), parameter.shape.begin(), parameter.shape.end());
      places.insert(places.end(), parameter.global_offset.begin(), parameter.global_offset.end());
    }
  }
  if (cut.empty()) return {};
  const auto row = mesh.communicator(mesh.dims().front().name);
  at::Tensor all;
  engine.main().exclusively(
      [&] { all = row->exchange(at::tensor(places, at::kLong), {.operation = "full_weights: tensor-parallel pieces", .unit = {}}); });
  Assemblies assemblies;
  std::int64_t begin = 0;
  for (const auto* parameter : cut) {
    const auto dims = static_cast<std::int64_t>(parameter->shape.size());
    weights::Assembly assembly{.rows = {row}, .shapes = {}, .boxes = {}};
    for (int rank = 0; rank < row->size(); ++rank) {
      const auto* shape = all[rank].const_data_ptr<std::int64_t>() + begin;
      assembly.shapes.emplace_back(shape, shape + dims);
      const std::vector<std::int64_t> in_whole(shape + dims, shape + 2 * dims);
      const std::vector<std::int64_t> in_piece(in_whole.size(), 0);
      assembly.boxes.push_back({{.in_piece = in_piece, .in_whole = in_whole, .sizes = assembly.shapes.back()}});
    }
    begin += 2 * dims;
    assemblies[parameter] = std::make_shared<const weights::Assembly>(std::move(assembly));
  }
  return assemblies;
}

/// The parameters in the order of named_parameters(), and the buffers.
std::vector<weights::Entry> entries_of(const torch::nn::Module& module, const engine::Engine& engine, const Assemblies& assemblies) {
  std::vector<std::pair<std::size_t, weights::Entry>> ordered;
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto slice = unit->main_slice(i);
      const auto assembly = assemblies.find(&parameter);
      ordered.emplace_back(parameter.position,
                           weights::Entry{.names = {parameter.name},
                                          .shape = assembly == assemblies.end() ? parameter.shape : parameter.global_shape,
                                          .own = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                                          .unit = unit.get(),
                                          .parameter = i,
                                          .assembly = assembly == assemblies.end() ? nullptr : assembly->second});
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
  weights::Request request{.engines = {handle(module).engine()}, .meshes = {}, .entries = {}, .options = std::move(options), .problem = {}};
  auto& engine = *request.engines.front();
  const auto& pieces = engine.options().tensor_parallel;
  if (pieces.defined()) request.meshes = {pieces, engine.options().mesh};
  try {
    engine.main().flush_writes();
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    request.problem = error.what();
  }
  const auto assemblies = assemblies_of(engine);
  if (request.problem.empty()) {
    request.entries = entries_of(module, engine, assemblies);
    try {
      choose(request, request.options.names, request.options.rename);
    } catch (const Error& error) {
      request.problem = error.what();
      request.entries.clear();
    }
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
