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

/// Ranks along one or several dimensions, of one mesh or of several, that speak as one. All methods are collective, block, and throw
/// CommError.
class Ranks {
 public:
  /// The rows in which this rank stands, the outermost dimension first; null ones are left out.
  explicit Ranks(std::vector<std::shared_ptr<Communicator>> rows);
  /// All ranks of a mesh.
  explicit Ranks(const DeviceMesh& mesh);

  std::int64_t size() const;
  /// This rank's position: along the last dimension it varies fastest.
  std::int64_t index() const;

  /// Every rank's values (a CPU tensor of equal shape and dtype on all), as rows of a CPU tensor [size(), numel], by index.
  at::Tensor exchange(const at::Tensor& values, const Label& label) const;
  /// The first rank's text, on all.
  std::string broadcast(const std::string& text, const Label& label) const;
  /// Every rank's text, by index, on the first rank; nothing on the others.
  std::vector<std::string> gather(const std::string& text, const Label& label) const;
  /// Sets the bits that some rank has set. As many on all ranks.
  void unite(std::span<std::uint8_t> bits, const Label& label) const;
  /// True on all ranks if `ok` is true on all of them.
  bool agree(bool ok, const Label& label) const;
  /// Throws Error on every rank if texts differ, naming two ranks and the first lines that do.
  void compare(std::string text, const Label& label) const;

 private:
  std::vector<std::shared_ptr<Communicator>> rows_;
};

}  // namespace fsdp::comm
