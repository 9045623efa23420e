#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/device_mesh.h"

namespace fsdp::comm {

/// A set of ranks along one or several dimensions, of one mesh or of several, with exchanges over all of them. All methods are collective,
/// block, and throw CommError.
class Ranks {
 public:
  /// Makes the set from this rank's rows, the outermost dimension first. Null rows are left out.
  explicit Ranks(std::vector<std::shared_ptr<Communicator>> rows);
  /// Makes the set of all ranks of a mesh.
  explicit Ranks(const DeviceMesh& mesh);

  std::int64_t size() const;
  /// This rank's position: along the last dimension it varies fastest.
  std::int64_t index() const;

  /// Every rank's values (a CPU tensor of equal shape and dtype on all), as rows of a CPU tensor [size(), numel], by index.
  at::Tensor exchange(const at::Tensor& values, const Label& label) const;
  /// Returns the first rank's text on all ranks.
  std::string broadcast(const std::string& text, const Label& label) const;
  /// Every rank's text, by index, on the first rank; nothing on the others.
  std::vector<std::string> gather(const std::string& text, const Label& label) const;
  /// Sets the bits that some rank has set. All ranks give the same number of bits.
  void unite(std::span<std::uint8_t> bits, const Label& label) const;
  /// True on all ranks if `ok` is true on all of them.
  bool agree(bool ok, const Label& label) const;
  /// Throws Error on every rank if the texts differ, naming two ranks and the first lines that differ.
  void compare(std::string text, const Label& label) const;

 private:
  std::vector<std::shared_ptr<Communicator>> rows_;
};

}  // namespace fsdp::comm
