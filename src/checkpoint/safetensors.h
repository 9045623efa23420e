#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/dtype.h"
#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// Hugging Face's format: a file is the length of its header (8 bytes), the header (JSON) and the tensors' data, row-major and without
/// gaps. A model of several files has an index beside them. This file reads and writes only headers. Data are read and written at the
/// places that the headers state, in any order and by any rank.

inline constexpr std::string_view kSafetensorsFile = "model.safetensors";
inline constexpr std::string_view kSafetensorsIndex = "model.safetensors.index.json";

struct SafetensorsTensor {
  std::string name;
  Dtype dtype = Dtype::float32;
  Shape shape;
  std::int64_t offset = 0;  ///< The position of the first byte in the file.
  std::int64_t length = 0;  ///< The length of the data in bytes.
  /// The reason why the data of a tensor that was found in a file cannot be read. The tensor then has no dtype, and the shape that the file
  /// states. Empty if the data can be read.
  std::string unreadable = {};
  /// The position at which it begins in the tensor of which it is a part (safetensors_parts.h); empty for a whole tensor.
  Shape begin = {};

  bool operator==(const SafetensorsTensor&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;       ///< In the order of their data.
  std::map<std::string, std::string> metadata;  ///< Free text by key.
};

/// Reads the header of a file of `size` bytes. It checks that header and data fill the file exactly, that each tensor's data have the size
/// that dtype and shape ask for and do not overlap, and that all names differ. A tensor whose dtype this library does not know is
/// unreadable; the others are not affected. Errors begin with `file`. Time and memory grow linearly with the size of the header, which is
/// at most 100 MB and at most the size of the file, whatever the header contains.
SafetensorsHeader read_safetensors_header(const ReadAt& read, std::int64_t size, const std::string& file);

/// A file of a model, with what is in it.
struct SafetensorsFile {
  std::string name;
  std::vector<SafetensorsTensor> tensors;
  /// If the file does not exist: the names of the tensors that the index places in it. This is an error only for a program that needs one
  /// of them.
  std::vector<std::string> not_there = {};
};

/// Reads the text of an index. Returns the names of tensors by the file in which it places them. Errors begin with `file`.
std::map<std::string, std::set<std::string>> read_safetensors_index(std::string_view text, const std::string& file);

/// True if read_safetensors() can read `path`: a file, or a folder with a `model.safetensors`, an index, or the files that DCP's ranks
/// wrote.
bool is_safetensors(const std::filesystem::path& path);

/// Reads the headers of a model: `path` is a file, or a folder with a `model.safetensors` or, if it has none, an index, or else the files
/// that DCP's ranks wrote. Names of files are relative to the folder. Tensors that the index does not name are left out. Tensors that it
/// names must be in their files, as far as these exist.
std::vector<SafetensorsFile> read_safetensors(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// A file to be written.
struct PlannedSafetensors {
  SafetensorsFile file;
  std::string head;       ///< The bytes before the data.
  std::int64_t size = 0;  ///< The size of the whole file, bytes.
};

struct SafetensorsPlan {
  std::vector<PlannedSafetensors> files;
  std::string index;  ///< The text of the index; empty if there is one file only, which needs none.
};

struct SafetensorsOptions {
  /// A file takes tensors up to this size, or one larger one.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
  /// transformers loads files of format "pt".
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Divides tensors among files, in their order, and plans where their data go. (The given offsets and lengths are ignored.) Within a file,
/// tensors with larger elements come first, so that all are aligned.
SafetensorsPlan plan_safetensors(const std::vector<SafetensorsTensor>& tensors, const SafetensorsOptions& options = {});

/// Makes the files of a plan, without their data, and its index. One process calls this, before fill_safetensors().
void create_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan, FileSystem& files = FileSystem::current());

/// Opens the files of a plan one after the other, and syncs each. `write` writes a tensor's data, or the part that this process has, into
/// the file.
void fill_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan,
                      const std::function<void(const SafetensorsTensor& tensor, File& file)>& write,
                      FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
