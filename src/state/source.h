#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/checked_files.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/dtype.h"
#include "checkpoint/python_value.h"
#include "checkpoint/records.h"

namespace fsdp::state {

/// Files of some format that tensors are loaded from, by this library's names ("model.layers.0.weight"). All that is read is checked
/// against checksums, where there are any.
class Source {
 public:
  enum class Format : std::uint8_t { kDcp, kSafetensors };
  struct Tensor {
    ckpt::Dtype dtype = ckpt::Dtype::float32;
    ckpt::Shape shape;
  };
  /// A box of a tensor, and the bytes that its data are among.
  struct StoredBox {
    ckpt::Box box;
    ckpt::RecordLocation place;
  };

  virtual ~Source() = default;
  virtual Format format() const = 0;
  virtual const std::string& path() const = 0;
  /// Of tensors and other values.
  virtual const std::vector<std::string>& names() const = 0;
  virtual bool has(const std::string& name) const = 0;
  /// Nothing if there is no tensor of this name.
  virtual std::optional<Tensor> find(const std::string& name) const = 0;
  /// Why a tensor that is there cannot be read: of a dtype that this library does not know, say. Empty for all else.
  virtual std::string unreadable(const std::string& name) const = 0;
  /// What a tensor is stored as.
  virtual std::vector<StoredBox> boxes(const std::string& name) const = 0;
  /// Where in its file a part's data are. Throws Error.
  virtual ckpt::TensorData locate(const std::string& name, const StoredBox& part) = 0;
  virtual ckpt::CheckedFile& file(const std::string& name) = 0;
  /// Elements [offset, offset + numel) of a box of the tensor, row-major: 1-D, on the CPU, of its stored dtype. Throws Error.
  at::Tensor read(const std::string& name, const ckpt::Box& box, std::int64_t offset, std::int64_t numel);
  /// All of a tensor that is there, in its shape.
  at::Tensor read_whole(const std::string& name);
  /// A plain value. Throws Error.
  virtual ckpt::PythonValue read_object(const std::string& name) = 0;
  /// Where a value is in nested dictionaries and lists, if that is known; else the name.
  virtual ckpt::DcpPath path_of(const std::string& name) const { return {name}; }

 private:
  friend class Transfer;

  std::set<std::pair<std::string, std::int64_t>> whole_records_;  ///< By file and offset: those whose own checksum was compared.
};

/// Brings parts of tensors to where they belong, and checks them: blocks against the sidecar's checksums, where there is none whole records
/// against their own. It does so in one of two ways, neither of which keeps a copy of a model beside it.
/// - check(), then read(): all that is needed is read once, and nothing is kept of it but checksums. Then it is read again, straight to its
///   place (from the system's memory, as a rule), and compared with these. So damage is found before anything is overwritten.
/// - read_at_once(): it is read straight to its place, and checked there. This takes half of the time, and what is damaged is found when
///   some places are overwritten already.
class Transfer {
 public:
  explicit Transfer(Source& source) : source_(source) {}

  /// Notes that elements [offset, offset + to.numel()) of a box of the tensor go to `to` (1-D, contiguous; any dtype and device). Reads
  /// nothing. Throws Error unless the tensor's parts have each of them once.
  void add(const std::string& name, const ckpt::Box& box, std::int64_t offset, at::Tensor to);
  /// Of the places that were added.
  std::int64_t bytes() const;
  /// Reads all blocks of files that hold what was added, in the files' order. Throws Error.
  void check() { pass(false); }
  /// After check(). Throws Error if what could be read then cannot be read now, or is something else.
  void read();
  /// Instead of both. What has to be rearranged, and columns that are converted, are checked before, all the same. Throws Error.
  void read_at_once();

 private:
  /// Elements that lie side by side, in a file and where they go.
  struct FileRun {
    const ckpt::CheckedFile* file;
    std::int64_t byte;  ///< In the file.
    std::int64_t to;
    std::int64_t numel;
    std::uint32_t crc32;
  };
  /// A part whose elements do not lie row-major, or stand for others (torch's lazy conjugates and negatives): it takes memory of its own.
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
    bool as_it_is;      ///< In host memory, of the stored dtype: can be read into.
    bool side_by_side;  ///< What each part has of it lies side by side there.
    /// What read() reads.
    std::vector<FileRun> file_runs;
    std::vector<Rearranged> rearranged;
  };
  struct WantedBox {
    std::size_t wanted;
    Source::StoredBox part;
    std::vector<ckpt::Run> runs;
  };

  /// Checks all, in the files' order. `assigns`: also brings it to its place, as far as that does not take another reading.
  void pass(bool assigns);
  void pass(const WantedBox& part, bool assigns);
  static void read_directly(const Wanted& wanted);
  static void read_and_convert(const Wanted& wanted);
  static void read_rearranged(const Wanted& wanted, const Rearranged& part);

  Source& source_;
  std::vector<Wanted> wanted_;
  std::vector<WantedBox> wanted_boxes_;
};

/// Opens a folder of torch.distributed.checkpoint, or Hugging Face's safetensors (a file, or a folder of them), whose names get "model." in
/// front. Throws Error.
std::unique_ptr<Source> open_source(const std::string& path);

}  // namespace fsdp::state
