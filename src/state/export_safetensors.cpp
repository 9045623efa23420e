#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/safetensors.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/save_load.h"
#include "state/ranks.h"
#include "state/scalar_type.h"
#include "state/state_items.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

/// Returns the dtype in which a tensor is written.
at::ScalarType written_type(const at::Tensor& values, const ExportOptions& options) {
  return options.dtype && state::is_convertible(values.scalar_type()) ? *options.dtype : values.scalar_type();
}

ckpt::SafetensorsPlan plan_of(const std::vector<state::StateItem>& items, const ExportOptions& options) {
  std::vector<ckpt::SafetensorsTensor> tensors;
  for (const auto& item : items) {
    ckpt::SafetensorsTensor tensor;
    tensor.name = item.key();
    tensor.dtype = state::dtype_of(written_type(item.values, options), item.key());
    tensor.shape = item.shape;
    tensors.push_back(std::move(tensor));
  }
  return ckpt::plan_safetensors(std::move(tensors), {.most_bytes_per_file = options.most_bytes_per_file});
}

/// Writes this rank's own values of every tensor, one after the other.
void write_own(const fs::path& folder, const ckpt::SafetensorsPlan& plan, const std::vector<state::StateItem>& items,
               const ExportOptions& options) {
  std::map<std::string, const state::StateItem*> by_name;
  for (const auto& item : items) by_name.emplace(item.key(), &item);
  ckpt::fill_safetensors(folder, plan, [&](const ckpt::SafetensorsTensor& tensor, ckpt::File& file) {
    const auto& item = *by_name.at(tensor.name);
    if (item.own_numel == 0) return;
    const auto values = item.values.narrow(0, item.own_begin, item.own_numel).to(written_type(item.values, options)).cpu().contiguous();
    const auto* data = static_cast<const char*>(values.const_data_ptr());
    const auto itemsize = values.element_size();
    const auto begin = item.offset + item.own_begin;
    for (const auto& run : ckpt::runs_to_box(item.box, ckpt::whole(item.shape))) {
      const auto from = std::max(run.source, begin);
      const auto to = std::min(run.source + run.length, begin + item.own_numel);
      if (from >= to) continue;
      file.write_at(tensor.offset + (run.destination + from - run.source) * itemsize,
                    {data + (from - begin) * itemsize, static_cast<std::size_t>((to - from) * itemsize)});
    }
  });
}

}  // namespace

void export_safetensors(const std::string& path, torch::nn::Module& module, ExportOptions options) {
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  const state::CheckpointRanks ranks(*engine, state::CheckpointRanks::Groups::kOfMesh);
  const bool leads = ranks.index() == 0;
  const std::string what = "the model could not be exported to " + path + ":";
  std::vector<state::StateItem> items;
  ckpt::SafetensorsPlan plan;
  std::optional<ckpt::TemporaryStep> step;
  fs::path folder;
  try {
    ranks.together(what, [&] {
      if (options.most_bytes_per_file < 1) throw Error("most_bytes_per_file must be positive");
      engine->main().flush_writes();
      items = state::model_items(module, "");
      plan = plan_of(items, options);
      if (!leads) return;
      step = ckpt::begin_new(path);
      folder = step->path();
      ckpt::create_safetensors(folder, plan);
    });
    const fs::path shared = ranks.broadcast(folder.string(), "export: its folder");
    ranks.together(what, [&] { write_own(shared, plan, items, options); });
    ranks.together(what, [&] {
      if (!leads) return;
      ckpt::sync_folder(folder);
      ckpt::commit_new(folder, path);
    });
  } catch (...) {
    if (step) step->discard();
    throw;
  }
}

}  // namespace fsdp
