#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>
#include <variant>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"
#include "state/scalar_type.h"

namespace fsdp::testing {

/// All tensors of a checkpoint, whole, by name. Reads box by box with nothing of the loader.
inline std::map<std::string, at::Tensor> stored_tensors(const std::filesystem::path& folder) {
  const auto text = ckpt::read_whole(folder / ckpt::kMetadataFile, std::int64_t{1} << 30);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : ckpt::read_dcp_metadata(text, folder.string()).items) {
    const auto* stored = std::get_if<ckpt::DcpTensor>(&item.content);
    if (stored == nullptr) continue;
    const auto type = state::scalar_type_of(stored->dtype, item.name);
    auto whole = at::zeros(stored->shape, type);
    for (const auto& chunk : stored->chunks) {
      if (ckpt::numel(chunk.box.sizes) == 0) continue;
      const auto file = ckpt::File::open(folder / chunk.record.file);
      const auto data = ckpt::locate_tensor(file.reader(), chunk.record, item.name);
      auto part = at::empty(chunk.box.sizes, type);
      file.read_at(data.offset, {static_cast<char*>(part.data_ptr()), part.nbytes()});
      auto place = whole;
      for (std::size_t d = 0; d < chunk.box.sizes.size(); ++d) {
        place = place.narrow(static_cast<std::int64_t>(d), chunk.box.offsets[d], chunk.box.sizes[d]);
      }
      place.copy_(part);
    }
    tensors.emplace(item.name, whole);
  }
  return tensors;
}

}  // namespace fsdp::testing
