#include "state/rank_file.h"

#include <map>
#include <string_view>
#include <utility>
#include <variant>

#include "checkpoint/check.h"
#include "checkpoint/dcp_file.h"
#include "fsdp/error.h"

namespace fsdp::state {
namespace {

using ckpt::DcpMetadata;
using ckpt::DcpTensor;

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

std::string name_of_file(std::int64_t rank) { return "__" + std::to_string(rank) + "_0.distcp"; }

RankFile write_records(const std::filesystem::path& folder, const Snapshot& snapshot, std::int64_t rank) {
  ckpt::DcpFile file(folder, name_of_file(rank));
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
  const auto metadata = ckpt::write_dcp_metadata(file.take_metadata());
  RankFile written{.listed = file.finish(), .text = {}};
  written.text = ckpt::line_of(written.listed) + "\n" + metadata;
  return written;
}

JoinedFiles join_files(const std::vector<std::string>& texts) {
  std::vector<DcpMetadata> parts;
  JoinedFiles joined;
  for (const std::string_view text : texts) {
    const auto line_end = text.find('\n');
    joined.listed.push_back(ckpt::listed_in(text.substr(0, line_end)));
    parts.push_back(ckpt::read_dcp_metadata(text.substr(line_end + 1), "the metadata of " + joined.listed.back().name));
  }
  joined.metadata = ckpt::write_dcp_metadata(united(parts));
  return joined;
}

}  // namespace fsdp::state
