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
/// gaps. A model of several files has an index beside them. Only headers are read and written here; ranges of the data are read and written
/// where these say, in any order and from any rank.

inline constexpr std::string_view kSafetensorsFile = "model.safetensors";
inline constexpr std::string_view kSafetensorsIndex = "model.safetensors.index.json";

struct SafetensorsTensor {
  std::string name;
  Dtype dtype = Dtype::float32;
  Shape shape;
  std::int64_t offset = 0;  ///< Of the first byte in the file.
  std::int64_t length = 0;  ///< In bytes.
  /// Of what was read: why its data cannot be, so that it has no dtype here, and the shape of the file. Empty where they can.
  std::string unreadable = {};
  /// Where it begins in the tensor that it is a part of (safetensors_parts.h); empty for a whole one.
  Shape begin = {};

  bool operator==(const SafetensorsTensor&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;       ///< In the order of their data.
  std::map<std::string, std::string> metadata;  ///< Free text by key.
};

/// Reads the header of a file of `size` bytes. Checked: that header and data fill the file exactly, that each tensor's data have the size
/// that dtype and shape ask for and do not overlap, and that all names differ. A tensor of a dtype that this library does not know is
/// unreadable, and nothing else is. Errors begin with `file`. Time grows with the header's size, which is at most 100 MB and the file's,
/// and so does memory: some times that size, whatever the header says.
SafetensorsHeader read_safetensors_header(const ReadAt& read, std::int64_t size, const std::string& file);

/// A file of a model, with what is in it.
struct SafetensorsFile {
  std::string name;
  std::vector<SafetensorsTensor> tensors;
  /// Of a file that is not there: the tensors that the index places in it. Who has no use for them does not miss it.
  std::vector<std::string> not_there = {};
};

/// The names that the text of an index gives to files, by file. Errors begin with `file`.
std::map<std::string, std::set<std::string>> read_safetensors_index(std::string_view text, const std::string& file);

/// Whether read_safetensors() is what reads `path`: a file, or a folder with a `model.safetensors`, an index, or DCP's files of ranks.
bool is_safetensors(const std::filesystem::path& path);

/// Reads the headers of a model: `path` is a file, or a folder with a `model.safetensors` or, if it has none, an index, or else the files
/// that DCP's ranks wrote. Names of files are relative to the folder. What files hold beyond what the index names is left out; what it
/// names must be in the files that are there.
std::vector<SafetensorsFile> read_safetensors(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// A file to be written.
struct PlannedSafetensors {
  SafetensorsFile file;
  std::string head;       ///< What comes before the data.
  std::int64_t size = 0;  ///< Of the whole file.
};

struct SafetensorsPlan {
  std::vector<PlannedSafetensors> files;
  std::string index;  ///< The text of the index; empty for one file, which has none.
};

struct SafetensorsOptions {
  /// A file takes tensors up to this size, or one larger one.
  std::int64_t most_bytes_per_file = std::int64_t{5} << 30;
  /// transformers loads files of format "pt".
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Divides tensors (offsets and lengths are ignored) among files, in their order, and says where their data go. Within a file, those with
/// larger elements come first, so that all are aligned.
SafetensorsPlan plan_safetensors(const std::vector<SafetensorsTensor>& tensors, const SafetensorsOptions& options = {});

/// Makes the files of a plan, without their data, and its index. One process calls this, before fill_safetensors().
void create_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan, FileSystem& files = FileSystem::current());

/// Opens one file of a plan after the other, and syncs it. `write` puts a tensor's data, or what this process has of them, into its file.
void fill_safetensors(const std::filesystem::path& folder, const SafetensorsPlan& plan,
                      const std::function<void(const SafetensorsTensor& tensor, File& file)>& write,
                      FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
