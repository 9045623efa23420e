// A checkpoint is written: every rank its file, rank 0 what joins them.

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/check.h"
#include "checkpoint/commit.h"
#include "checkpoint/records.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

using ckpt::DcpMetadata;
using ckpt::DcpTensor;

/// Writes a rank's records; says where they are.
std::pair<DcpMetadata, ckpt::ListedFile> write_records(const fs::path& folder, const Snapshot& snapshot, std::int64_t rank) {
  const auto name = "__" + std::to_string(rank) + "_0.distcp";
  ckpt::SummedFile out(folder, name);
  DcpMetadata metadata;
  for (const auto& tensor : snapshot.tensors) {
    DcpTensor stored{.dtype = tensor.dtype, .shape = tensor.shape, .chunks = {}};
    for (const auto& chunk : tensor.chunks) {
      const ckpt::TensorRecord record(tensor.dtype, chunk.box.sizes);
      stored.chunks.push_back({chunk.box, {name, out.size(), record.length()}});
      out.append(record.head());
      const auto bytes = chunk.bytes.cpu();
      const auto crc = out.append({static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel())});
      out.append(record.tail(crc));
    }
    metadata.items.push_back({tensor.key, std::move(stored)});
    metadata.paths.emplace_back(tensor.key, tensor.path);
  }
  for (const auto& object : snapshot.objects) {
    const auto record = ckpt::object_record(object.value);
    metadata.items.push_back({object.key, ckpt::DcpObject{{name, out.size(), static_cast<std::int64_t>(record.size())}}});
    out.append(record);
    metadata.paths.emplace_back(object.key, object.path);
  }
  return {std::move(metadata), out.finish()};
}

/// What ranks tell rank 0: the file's line in the sidecar, then the metadata.
std::string packed(const DcpMetadata& metadata, const ckpt::ListedFile& file) {
  return ckpt::line_of(file) + "\n" + ckpt::write_dcp_metadata(metadata);
}

std::pair<DcpMetadata, ckpt::ListedFile> unpacked(const std::string& text) {
  const auto line_end = text.find('\n');
  auto file = ckpt::listed_in(std::string_view(text).substr(0, line_end));
  auto metadata = ckpt::read_dcp_metadata(std::string_view(text).substr(line_end + 1), "the metadata of " + file.name);
  return {std::move(metadata), std::move(file)};
}

/// All ranks' records. Throws Error unless the boxes of every tensor make it up, each element once.
DcpMetadata joined(const std::vector<DcpMetadata>& parts) {
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

void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const Ranks& ranks) {
  // "run/1/" is run/1, and lies in run.
  const fs::path target = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  const std::string what = "the checkpoint " + path + " could not be written:";
  const bool leads = ranks.index() == 0;
  std::exception_ptr failure;
  const auto attempt = [&](const auto& body) {
    if (failure) return;
    try {
      body();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  };

  std::optional<ckpt::TemporaryStep> step;
  attempt([&] {
    if (options.keep_last < 0) throw Error("keep_last is " + std::to_string(options.keep_last) + "; give 0 (all are kept) or more");
    if (leads) step = ckpt::begin_step(target);
  });
  ranks.agree(failure, what);
  const fs::path folder = ranks.gather(step ? step->path().string() : "", "checkpoint: its folder")[0];

  std::string part;
  fs::path replaced;
  attempt([&] {
    const auto [metadata, file] = write_records(folder, snapshot, ranks.index());
    part = packed(metadata, file);
  });
  try {
    ranks.agree(failure, what);
    const auto parts = ranks.gather_at_first(part, "checkpoint: what ranks wrote");
    if (leads) {
      attempt([&] {
        std::vector<DcpMetadata> metadata;
        std::vector<ckpt::ListedFile> listed;
        for (const auto& text : parts) {
          auto [some, file] = unpacked(text);
          metadata.push_back(std::move(some));
          listed.push_back(std::move(file));
        }
        ckpt::SummedFile file(folder, std::string(ckpt::kMetadataFile));
        file.append(ckpt::write_dcp_metadata(joined(metadata)));
        listed.push_back(file.finish());
        ckpt::seal_step(folder, listed);
        replaced = ckpt::commit_step(folder, target);
      });
    }
    ranks.agree(failure, what);
  } catch (...) {
    if (step) step->discard();
    throw;
  }
  attempt([&] {
    step.reset();
    if (!replaced.empty()) ckpt::remove_tree(replaced);
    if (leads && options.keep_last > 0) ckpt::prune_steps(target, options.keep_last);
  });
  ranks.agree(failure, "the checkpoint " + path + " is complete, but older ones could not be removed:");
}

}  // namespace fsdp::state
