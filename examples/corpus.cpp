#include "corpus.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_set>

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kValidationShare = 20;  // one part in so many

using Bytes = std::vector<std::uint8_t>;

// The finalizer of splitmix64 (Steele et al., 2014): neighbouring inputs give unrelated outputs. Not std::hash or <random>'s
// distributions, whose results depend on the standard library.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t hash(std::string_view text) {  // FNV-1a, mixed: its own high bits hardly depend on the last characters
  std::uint64_t h = 0xcbf29ce484222325;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3;
  return mix(h);
}

// "ops/_add_relu.h" -> "ops/add"
std::string group_of(const fs::path& relative) {
  const std::string name = relative.filename().string();
  const auto start = std::min(name.find_first_not_of('_'), name.size());
  return (relative.parent_path() / name.substr(start, name.find_first_of("_.", start) - start)).generic_string();
}

[[noreturn]] void fail_to_read(const fs::path& path, const std::error_code& why) {
  throw std::runtime_error("cannot read " + path.string() + ": " + why.message());
}

Bytes read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail_to_read(path, {errno, std::generic_category()});
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_text(const Bytes& bytes) { return !bytes.empty() && std::find(bytes.begin(), bytes.end(), 0) == bytes.end(); }

std::vector<fs::path> files_below(const fs::path& folder) {
  std::error_code error;
  fs::directory_iterator(folder, error);  // skip_permission_denied would take a closed folder for an empty one
  if (error) fail_to_read(folder, error);
  std::vector<fs::path> files;
  for (auto it = fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied); it != fs::end(it); ++it) {
    const bool hidden = it->path().filename().string().starts_with('.');
    if (hidden && it->is_directory(error)) it.disable_recursion_pending();
    // A link that leads nowhere has no type, which is no reason to stop.
    if (!hidden && it->is_regular_file(error)) files.push_back(it->path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void append(Bytes& to, const Bytes& file) {
  to.push_back(Corpus::kStart);
  to.insert(to.end(), file.begin(), file.end());
}

// Moves the last part of `train` to `validation`.
void split_tail(Bytes& train, Bytes& validation) {
  const auto tail = train.end() - static_cast<std::ptrdiff_t>(train.size() / kValidationShare);
  validation.assign(tail, train.end());
  train.erase(tail, train.end());
}

// Fills row i of a batch with the context + 1 bytes at text[begins(i)].
template <typename Begins>
Batch cut(const Bytes& text, std::int64_t count, std::int64_t context, Begins begins) {
  if (static_cast<std::int64_t>(text.size()) <= context) throw std::runtime_error("the text is shorter than the context");
  Batch batch{at::empty({count, context}, at::kLong), at::empty({count, context}, at::kLong)};
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* from = text.data() + begins(i);
    std::copy_n(from, context, batch.tokens.data_ptr<std::int64_t>() + i * context);
    std::copy_n(from + 1, context, batch.targets.data_ptr<std::int64_t>() + i * context);
  }
  return batch;
}

}  // namespace

Corpus::Corpus(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) throw std::runtime_error(path.string() + " does not exist");
  if (error) fail_to_read(path, error);
  if (!fs::is_directory(status)) {
    const auto text = read_file(path);
    if (text.empty()) throw std::runtime_error(path.string() + " is empty");
    if (!is_text(text)) throw std::runtime_error(path.string() + " is not a text file");
    append(train_, text);
    split_tail(train_, validation_);
    files_ = 1;
    return;
  }

  std::map<std::string, std::uint64_t> groups;  // and their hashes
  const auto paths = files_below(path);
  for (const auto& file : paths) {
    const auto group = group_of(file.lexically_relative(path));
    groups.emplace(group, hash(group));
  }
  std::uint64_t lowest = ~std::uint64_t{0};
  for (const auto& [group, h] : groups) lowest = std::min(lowest, h);
  const std::uint64_t limit = std::max(lowest, ~std::uint64_t{0} / kValidationShare);

  std::unordered_set<std::uint64_t> seen;
  for (const auto& file : paths) {
    const auto text = read_file(file);
    if (!is_text(text) || !seen.insert(hash({reinterpret_cast<const char*>(text.data()), text.size()})).second) continue;
    append(groups.at(group_of(file.lexically_relative(path))) <= limit ? validation_ : train_, text);
    ++files_;
  }
  if (files_ == 0) throw std::runtime_error(path.string() + " holds no text");
  if (train_.empty()) train_.swap(validation_);
  if (validation_.empty()) split_tail(train_, validation_);
}

Batch Corpus::sample(const BatchSlice& slice, std::int64_t context) const {
  const std::uint64_t places = train_.size() - static_cast<std::uint64_t>(context);
  return cut(train_, slice.count, context, [&](std::int64_t i) {
    return mix(mix(mix(slice.seed) + static_cast<std::uint64_t>(slice.step)) + static_cast<std::uint64_t>(slice.first + i)) % places;
  });
}

Batch Corpus::validation_batch(std::int64_t first, std::int64_t count, std::int64_t total, std::int64_t context) const {
  const std::uint64_t places = validation_.size() - static_cast<std::uint64_t>(context);
  return cut(validation_, count, context, [&](std::int64_t i) {
    return static_cast<std::uint64_t>(std::min(first + i, total - 1)) * places / static_cast<std::uint64_t>(total);
  });
}
