#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/checked_files.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/dtype.h"
#include "checkpoint/python_value.h"
#include "checkpoint/records.h"

namespace fsdp::state {

/// A tensor or a plain value.
using StoredValue = std::variant<at::Tensor, ckpt::PythonValue>;

/// The files of a checkpoint, of any format, from which tensors are loaded by this library's names ("model.layers.0.weight"). All data that
/// are read are compared with checksums, if there are any.
class Source {
 public:
  enum class Format : std::uint8_t { kDcp, kSafetensors };
  struct Tensor {
    ckpt::Dtype dtype = ckpt::Dtype::float32;
    ckpt::Shape shape;
  };
  /// A stored box of a tensor, and the bytes of a file that contain its data.
  struct StoredBox {
    ckpt::Box box;
    ckpt::RecordLocation place;
  };

  virtual ~Source() = default;
  virtual Format format() const = 0;
  virtual const std::string& path() const = 0;
  /// Distinguishes the checkpoint from others: Sidecar::saved; 0 if it is not known.
  virtual std::int64_t saved() const = 0;
  /// The names of tensors and other values.
  virtual const std::vector<std::string>& names() const = 0;
  virtual bool has(const std::string& name) const = 0;
  /// Returns a tensor's dtype and shape; nothing if there is no tensor of this name.
  virtual std::optional<Tensor> find(const std::string& name) const = 0;
  /// Returns the reason why an existing tensor cannot be read, such as a dtype that this library does not know. Empty for all other names.
  virtual std::string unreadable(const std::string& name) const = 0;
  /// Returns the boxes in which a tensor is stored.
  virtual std::vector<StoredBox> boxes(const std::string& name) const = 0;
  /// Returns the place of a part's data in its file. Throws Error.
  virtual ckpt::TensorData locate(const std::string& name, const StoredBox& part) = 0;
  virtual ckpt::CheckedFile& file(const std::string& name) = 0;
  /// Reads elements [offset, offset + numel) of a box of the tensor in row-major order. Returns a 1-D CPU tensor of the stored dtype.
  /// Throws Error.
  at::Tensor read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel);
  /// Reads a whole tensor, which must exist. It has its shape.
  at::Tensor read_whole(const std::string& name);
  /// Reads a plain value. Throws Error.
  virtual ckpt::PythonValue read_object(const std::string& name) = 0;
  /// Reads a tensor, which then has memory of its own, or a plain value. Throws Error.
  StoredValue read_value(const std::string& name);
  /// Reads a number or a bool, which may be stored as a tensor of one element. Returns nothing for other values. Throws Error.
  std::optional<ckpt::PythonValue> read_scalar(const std::string& name);
  /// Returns the path of a value in nested dictionaries and lists, if it is known; otherwise the name.
  virtual ckpt::DcpPath path_of(const std::string& name) const { return {name}; }

 private:
  friend class Transfer;

  std::set<std::pair<std::string, std::int64_t>>
      whole_records_;  ///< The records whose own checksums have been compared, by file and offset.
};

/// Reads parts of tensors to where they belong, and checks them: blocks by the sidecar's checksums or, if there is no sidecar, whole
/// records by their own. There are two ways to do this, and neither needs a copy of the model.
/// - check(), then read(): all needed data are read once, and only their checksums are kept. Then they are read again (usually from the
///   page cache), straight to their places, and compared with these checksums. Damage is therefore found before anything is overwritten.
/// - read_at_once(): the data are read straight to their places, and checked there. This takes half of the time, but when damage is found,
///   some places have been overwritten already.
class Transfer {
 public:
  explicit Transfer(Source& source) : source_(source) {}

  /// Notes that elements [offset, offset + to.numel()) of a box of the tensor go to `to` (1-D, contiguous; any dtype and device). Reads
  /// nothing. Throws Error unless the stored boxes contain each of these elements exactly once.
  void add(const std::string& name, const ckpt::Box& box, std::int64_t offset, at::Tensor to);
  /// The total size of the places that were added, in bytes.
  std::int64_t bytes() const;
  /// The places of the records that contain what was added.
  std::vector<ckpt::RecordLocation> needed() const;
  /// Reads and checks all blocks that contain elements which were added, in the order of the files. Throws Error.
  void check() { pass(false); }
  /// Reads the data to their places. Call it after check(). Throws Error if data can no longer be read, or have changed since.
  void read();
  /// Call it instead of check() and read(). Data that must be rearranged, and columns that are converted, are checked before they are
  /// assigned nevertheless. Throws Error.
  void read_at_once();

 private:
  /// Elements that lie side by side both in a file and in their destination.
  struct FileRun {
    const ckpt::CheckedFile* file;
    std::int64_t byte;  ///< The position in the file.
    std::int64_t to;
    std::int64_t numel;
    std::uint32_t crc32;
  };
  /// A part whose elements are not stored in row-major order, or whose values are lazy conjugates or negatives (torch). Reading it takes
  /// memory of its own.
  struct Rearranged {
    const ckpt::CheckedFile* file;
    ckpt::TensorData data;
    std::uint32_t crc32;
    std::vector<ckpt::Run> runs;
  };
  struct Wanted {
    std::string name;
    ckpt::Dtype dtype;
    at::Tensor to;
    bool as_it_is;      ///< Whether the destination is in host memory and has the stored dtype, so that data can be read into it.
    bool side_by_side;  ///< Whether the elements that come from each part lie side by side in the destination.
    /// The runs that read() reads.
    std::vector<FileRun> file_runs;
    std::vector<Rearranged> rearranged;
  };
  struct WantedBox {
    std::size_t wanted;
    Source::StoredBox part;
    std::vector<ckpt::Run> runs;
  };

  /// Checks all data, in the order of the files. With `assigns`, also copies them to their places, as far as this does not need another
  /// reading.
  void pass(bool assigns);
  void pass(const WantedBox& part, bool assigns);
  static void read_directly(const Wanted& wanted);
  static void read_and_convert(const Wanted& wanted);
  static void read_rearranged(const Wanted& wanted, const Rearranged& part);

  Source& source_;
  std::vector<Wanted> wanted_;
  std::vector<WantedBox> wanted_boxes_;
};

/// Returns a number as a double; nothing for other values.
std::optional<double> number_of(const ckpt::PythonValue& value);

/// Opens a checkpoint in the format of torch.distributed.checkpoint whose files may lie in several folders. `path` names it in messages.
/// Throws Error.
std::unique_ptr<Source> open_source(const std::string& path, ckpt::PathOf path_of);
/// Opens a folder of torch.distributed.checkpoint, or Hugging Face's safetensors (a file, or a folder of them), whose names get "model." in
/// front. Throws Error.
std::unique_ptr<Source> open_source(const std::string& path);

}  // namespace fsdp::state
