#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/dtype.h"
#include "checkpoint/python_value.h"
#include "state/ranks.h"

namespace fsdp::state {

/// Files of some format that tensors are loaded from, by this library's names ("model.layers.0.weight").
class Source {
 public:
  enum class Format : std::uint8_t { kDcp, kSafetensors };
  struct Tensor {
    ckpt::Dtype dtype = ckpt::Dtype::float32;
    ckpt::Shape shape;
  };

  virtual ~Source() = default;
  virtual Format format() const = 0;
  virtual const std::string& path() const = 0;
  /// Of tensors and other values.
  virtual const std::vector<std::string>& names() const = 0;
  virtual bool has(const std::string& name) const = 0;
  /// Nothing if there is no tensor of this name.
  virtual std::optional<Tensor> find(const std::string& name) const = 0;
  /// Elements [offset, offset + numel) of a box of the tensor, row-major: 1-D, on the CPU, of its stored dtype. Reads only these. Throws
  /// Error.
  virtual at::Tensor read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel) = 0;
  /// All of a tensor that is there, in its shape.
  at::Tensor read_whole(const std::string& name);
  /// A plain value. Throws Error.
  virtual ckpt::PythonValue read_object(const std::string& name) = 0;
  /// Checks this rank's share of the files against checksums, where there are any. Throws Error.
  virtual void verify(const Ranks& ranks) const = 0;
};

/// Opens a folder of torch.distributed.checkpoint, or Hugging Face's safetensors (a file, or a folder of them), whose names get "model." in
/// front. Throws Error.
std::unique_ptr<Source> open_source(const std::string& path);

}  // namespace fsdp::state
