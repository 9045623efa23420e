// Writes a checkpoint. Every rank writes its file, and rank 0 the files that join them.

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/check.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_file.h"
#include "checkpoint/printable.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "state/retention.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

using ckpt::DcpMetadata;
using ckpt::DcpTensor;

/// Writes a rank's records, and returns where they are.
std::pair<DcpMetadata, ckpt::ListedFile> write_records(const fs::path& folder, const Snapshot& snapshot, std::int64_t rank) {
  ckpt::DcpFile file(folder, "__" + std::to_string(rank) + "_0.distcp");
  for (const auto& tensor : snapshot.tensors) {
    file.add_tensor(tensor.key, tensor.path, tensor.dtype, tensor.shape);
    for (const auto& chunk : tensor.chunks) {
      file.add_box(chunk.box, [&](const ckpt::DcpFile::Append& append) {
        const auto bytes = chunk.bytes.cpu();
        append({static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel())});
      });
    }
  }
  for (const auto& object : snapshot.objects) file.add_value(object.key, object.path, object.value);
  return {file.take_metadata(), file.finish()};
}

/// Returns the text that ranks send to rank 0: the file's line in the sidecar, then the metadata.
std::string packed(const DcpMetadata& metadata, const ckpt::ListedFile& file) {
  return ckpt::line_of(file) + "\n" + ckpt::write_dcp_metadata(metadata);
}

std::pair<DcpMetadata, ckpt::ListedFile> unpacked(const std::string& text) {
  const auto line_end = text.find('\n');
  auto file = ckpt::listed_in(std::string_view(text).substr(0, line_end));
  auto metadata = ckpt::read_dcp_metadata(std::string_view(text).substr(line_end + 1), "the metadata of " + file.name);
  return {std::move(metadata), std::move(file)};
}

/// Joins the metadata of all ranks. Throws Error unless the boxes of every tensor contain each element exactly once.
DcpMetadata united(const std::vector<DcpMetadata>& parts) {
  DcpMetadata all;
  std::map<std::string, std::size_t> position;
  for (const auto& part : parts) {
    for (std::size_t i = 0; i < part.items.size(); ++i) {
      const auto& item = part.items[i];
      const auto [found, is_new] = position.emplace(item.name, all.items.size());
      if (is_new) {
        all.items.push_back(item);
        all.paths.push_back(part.paths[i]);
        continue;
      }
      auto* tensor = std::get_if<DcpTensor>(&all.items[found->second].content);
      const auto* more = std::get_if<DcpTensor>(&item.content);
      if (tensor == nullptr || more == nullptr || tensor->dtype != more->dtype || tensor->shape != more->shape) {
        throw Error("ranks have different tensors named '" + item.name + "'; give them different names");
      }
      // An empty tensor has the same one box on every rank.
      if (ckpt::numel(tensor->shape) > 0) tensor->chunks.insert(tensor->chunks.end(), more->chunks.begin(), more->chunks.end());
    }
  }
  for (const auto& item : all.items) {
    const auto* tensor = std::get_if<DcpTensor>(&item.content);
    if (tensor == nullptr) continue;
    const auto fault = ckpt::fault_in_boxes(*tensor);
    if (!fault.empty()) {
      throw Error("the ranks' parts of '" + item.name + "' do not make it up: " + fault +
                  "; do several ranks hold different parameters of this name?");
    }
  }
  return all;
}

}  // namespace

void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const CheckpointRanks& ranks,
                      Phases& phases) {
  const std::string what = "the checkpoint " + path + " could not be written:";
  const bool leads = ranks.index() == 0;
  std::optional<ckpt::TemporaryStep> step;
  std::string part;
  fs::path replaced;
  try {
    ranks.together(what, [&] {
      check_retention(options);
      if (leads) step = ckpt::begin_step(path);
    });
    // A path has no zero byte.
    const auto told = ranks.broadcast(step ? step->path().string() + '\0' + path : "", "checkpoint: exchange of its folder");
    const fs::path folder = told.substr(0, told.find('\0'));
    const auto of_rank0 = told.substr(told.find('\0') + 1);
    ranks.together(what, [&] {
      if (path != of_rank0) {
        throw Error("was called with the path " + ckpt::printable(path) + ", and rank 0 " + ckpt::printable(of_rank0) +
                    ": a checkpoint is one folder, to which each rank adds a file; give the same path on all ranks");
      }
      const auto [metadata, file] = write_records(folder, snapshot, ranks.index());
      part = packed(metadata, file);
      phases.end(Phase::kWrite, file.size);
    });
    const auto parts = ranks.gather(part, "checkpoint: list of what ranks wrote");
    ranks.together(what, [&] {
      if (!leads) return;
      std::vector<DcpMetadata> metadata;
      std::vector<ckpt::ListedFile> listed;
      for (const auto& text : parts) {
        auto [some, file] = unpacked(text);
        metadata.push_back(std::move(some));
        listed.push_back(std::move(file));
      }
      ckpt::seal_dcp(folder, united(metadata), std::move(listed));
      replaced = ckpt::commit_step(folder, path);
    });
  } catch (...) {
    if (step) step->discard();
    throw;
  }
  phases.end(Phase::kCommit, 0);
  ranks.together("the checkpoint " + path + " is complete, but older ones could not be removed:", [&] {
    step.reset();
    if (!replaced.empty()) ckpt::remove_tree(replaced);
    if (!leads || options.keep_last == 0) return;
    const auto keeps = [&](const std::vector<ckpt::Step>& steps) { return steps_that_stay(options, steps); };
    ckpt::prune_steps(path, options.keep_last, ckpt::FileSystem::current(), keeps);
  });
  phases.end(Phase::kPrune, 0);
}

}  // namespace fsdp::state
