#include "checkpoint/commit.h"

#include <linux/fs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/dcp_metadata.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kReplaced = ".old-";
constexpr std::size_t kRandomDigits = 8;

// So much is given to the disk at once. Linux alone would begin when a tenth of the memory waits, or at fsync.
constexpr std::int64_t kStarted = std::int64_t{8} << 20;
/// So much is written at once where pieces are smaller.
constexpr std::size_t kJoined = std::size_t{1} << 20;

// A line per file, 8 digits per block: enough for 32 TB.
constexpr std::int64_t kMostSidecar = std::int64_t{256} << 20;
constexpr std::string_view kFirstLine = "fsdp-checksums 3";
constexpr std::size_t kDigits = 8;  // of a checksum

std::string hexadecimal(std::uint32_t value) {
  char text[kDigits + 1];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

/// A name beside `target` that nobody has: prefix, target's name, random digits.
fs::path hidden_name(const fs::path& target, std::string_view prefix) {
  static thread_local std::random_device random;
  return target.parent_path() / (std::string(prefix) + target.filename().string() + "-" + hexadecimal(random()));
}

/// The target's name in a hidden one; empty for other names.
std::string_view name_in(std::string_view hidden, std::string_view prefix) {
  if (!hidden.starts_with(prefix) || hidden.size() <= prefix.size() + kRandomDigits + 1) return {};
  hidden.remove_prefix(prefix.size());
  hidden.remove_suffix(kRandomDigits + 1);
  return hidden;
}

fs::path parent_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

/// "ckpt/" is "ckpt".
fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

void make_folders(const fs::path& path, FileSystem& files) {
  if (is_there(path)) return;
  make_folders(parent_of(path), files);
  // Another process may have been faster.
  if (files.mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) throw_errno("create the folder", path);
  sync_folder(parent_of(path), files);
}

/// Throws Error unless what is at `step` may go: a checkpoint, an empty folder, or nothing.
void check_replaceable(const fs::path& step) {
  if (!is_there(step) || is_there(step / kSidecar) || is_there(step / kMetadataFile)) return;
  if (fs::is_directory(step) && fs::is_empty(step)) return;
  throw Error(step.string() + " is there and is no checkpoint: it is not overwritten; give another name, or remove it");
}

void rename_to(const fs::path& from, const fs::path& to, unsigned flags, FileSystem& files) {
  if (files.rename(from.c_str(), to.c_str(), flags) != 0) throw_errno("rename " + from.string() + " to", to);
}

/// Gives what is at `path` a temporary name, so that it is no step any more, before it goes file by file.
void remove_step(const fs::path& path, FileSystem& files) {
  const fs::path doomed = hidden_name(path, kTemporary);
  rename_to(path, doomed, 0, files);
  remove_tree(doomed, files);
}

/// The number at the end of a name.
std::optional<std::uint64_t> step_number(std::string_view name) {
  std::size_t begin = name.size();
  while (begin > 0 && name[begin - 1] >= '0' && name[begin - 1] <= '9') --begin;
  std::uint64_t number = 0;
  const auto result = std::from_chars(name.data() + begin, name.data() + name.size(), number);
  if (begin == name.size() || result.ec != std::errc()) return std::nullopt;
  return number;
}

/// What is wrong with a listed file; empty if nothing is, as far as can be seen without reading it.
std::string fault_of(const fs::path& step, const ListedFile& listed, FileSystem& files) {
  try {
    const std::int64_t size = File::open(step / listed.name, files).size();
    if (size == listed.size) return "";
    return listed.name + " has " + std::to_string(size) + " bytes instead of " + std::to_string(listed.size);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

// "<size> <name> <checksums>": a name may have spaces, what stands around it has none.
std::string line_of(const ListedFile& listed) {
  if (listed.name.empty() || listed.name.find_first_of("/\n") != std::string::npos) {
    throw Error("'" + listed.name + "' is no name for a file of a checkpoint");
  }
  std::string line = std::to_string(listed.size) + " " + listed.name + " ";
  line.reserve(line.size() + listed.crc32.size() * kDigits);
  for (const std::uint32_t sum : listed.crc32) line += hexadecimal(sum);
  return line;
}

ListedFile listed_in(std::string_view line) {
  const auto fail = [line] { throw Error("the line '" + std::string(line.substr(0, 200)) + "' is no file's"); };
  const std::size_t before_name = line.find(' ');
  const std::size_t after_name = line.rfind(' ');
  if (before_name == std::string_view::npos || before_name + 1 >= after_name) fail();
  ListedFile listed{std::string(line.substr(before_name + 1, after_name - before_name - 1))};
  const auto size = std::from_chars(line.data(), line.data() + before_name, listed.size);
  std::string_view sums = line.substr(after_name + 1);
  const bool has_size = size.ec == std::errc() && size.ptr == line.data() + before_name && listed.size >= 0;
  const bool has_sums = sums.size() % kDigits == 0 && static_cast<std::int64_t>(sums.size() / kDigits) == blocks_of(listed.size);
  if (!has_size || listed.name.find('/') != std::string::npos || !has_sums) fail();
  for (; !sums.empty(); sums.remove_prefix(kDigits)) {
    const auto sum = std::from_chars(sums.data(), sums.data() + kDigits, listed.crc32.emplace_back(), 16);
    if (sum.ec != std::errc() || sum.ptr != sums.data() + kDigits) fail();
  }
  return listed;
}

SummedFile::SummedFile(const fs::path& folder, std::string name, FileSystem& files)
    : file_(File::create(folder / name, files)), listed_{std::move(name)} {}

std::uint32_t SummedFile::append(std::span<const char> data) {
  const bool joins = data.size() < kJoined;
  if (!joins) flush();
  std::uint32_t all = 0;
  while (!data.empty()) {
    const std::int64_t in_block = listed_.size % kSummedBlock;
    const std::span<const char> piece = data.first(std::min(data.size(), static_cast<std::size_t>(kSummedBlock - in_block)));
    const std::uint32_t sum = crc32(0, piece);
    if (in_block == 0) {
      listed_.crc32.push_back(sum);
    } else {
      listed_.crc32.back() = combine_crc32(listed_.crc32.back(), sum, piece.size());
    }
    all = combine_crc32(all, sum, piece.size());
    if (joins) {
      waiting_.append(piece.data(), piece.size());
    } else {
      write(piece);
    }
    listed_.size += static_cast<std::int64_t>(piece.size());
    data = data.subspan(piece.size());
  }
  if (waiting_.size() >= kJoined) flush();
  return all;
}

void SummedFile::write(std::span<const char> data) {
  file_.write_at(written_, data);
  written_ += static_cast<std::int64_t>(data.size());
  if (written_ - started_ >= kStarted) {
    file_.start_writing(started_, written_ - started_);
    started_ = written_;
  }
}

void SummedFile::flush() {
  write(waiting_);
  waiting_.clear();
}

ListedFile SummedFile::finish() {
  flush();
  file_.sync();
  file_.close();
  return listed_;
}

fs::path begin_step(const fs::path& target, FileSystem& files) {
  const fs::path step = without_slash(target);
  check_replaceable(step);
  make_folders(parent_of(step), files);
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    const fs::path temporary = hidden_name(step, kTemporary);
    if (files.mkdir(temporary.c_str(), 0777) == 0) return temporary;
    if (errno != EEXIST || attempt == kAttempts) throw_errno("create the folder", temporary);
  }
}

void seal_step(const fs::path& temporary, std::span<const ListedFile> listed, FileSystem& files) {
  std::string text = std::string(kFirstLine) + "\n";
  for (const ListedFile& file : listed) text += line_of(file) + "\n";
  text += "end " + hexadecimal(crc32(0, text)) + "\n";
  write_whole(temporary / kSidecar, text, files);
  sync_folder(temporary, files);
}

fs::path commit_step(const fs::path& temporary, const fs::path& target, FileSystem& files) {
  const fs::path step = without_slash(target);
  const fs::path parent = parent_of(step);
  check_replaceable(step);
  /// Syncs what was renamed, or undoes it: on a disk that fails, the names as they were are the safer ones.
  const auto sync_or = [&](auto undo) {
    try {
      sync_folder(parent, files);
    } catch (const Error&) {
      undo();
      throw;
    }
  };
  if (!is_there(step)) {
    rename_to(temporary, step, 0, files);
    sync_or([&] { files.rename(step.c_str(), temporary.c_str(), 0); });
    return {};
  }
  if (files.rename(temporary.c_str(), step.c_str(), RENAME_EXCHANGE) == 0) {
    sync_or([&] { files.rename(temporary.c_str(), step.c_str(), RENAME_EXCHANGE); });
    return temporary;
  }
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) throw_errno("exchange " + temporary.string() + " with", step);
  const fs::path replaced = hidden_name(step, kReplaced);
  rename_to(step, replaced, 0, files);
  const auto restore = [&] { files.rename(replaced.c_str(), step.c_str(), 0); };
  try {
    rename_to(temporary, step, 0, files);
  } catch (const Error&) {
    restore();
    throw;
  }
  sync_or([&] {
    if (files.rename(step.c_str(), temporary.c_str(), 0) == 0) restore();
  });
  // No step any more, before it goes file by file.
  const fs::path doomed = hidden_name(step, kTemporary);
  return files.rename(replaced.c_str(), doomed.c_str(), 0) == 0 ? doomed : replaced;
}

std::vector<ListedFile> read_sidecar(const fs::path& step, FileSystem& files) {
  const fs::path path = step / kSidecar;
  const std::string text = read_whole(path, kMostSidecar, files);
  const auto fail = [&path](const std::string& why) { throw Error(path.string() + " is damaged: " + why); };
  // The last line sums the ones before.
  constexpr std::size_t kLastLine = 4 + kDigits + 1;
  if (!text.starts_with(std::string(kFirstLine) + "\n")) fail("it does not begin with '" + std::string(kFirstLine) + "'");
  if (text.size() < kFirstLine.size() + 1 + kLastLine) fail("it is cut off");
  const std::string lines = text.substr(0, text.size() - kLastLine);
  if (text.substr(lines.size()) != "end " + hexadecimal(crc32(0, lines)) + "\n") fail("its last line does not fit the others");

  std::vector<ListedFile> listed;
  std::string_view rest = lines;
  rest.remove_prefix(kFirstLine.size() + 1);
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    try {
      listed.push_back(listed_in(rest.substr(0, end)));
    } catch (const Error& error) {
      fail(error.what());
    }
    rest.remove_prefix(end + 1);
  }
  return listed;
}

bool is_complete(const fs::path& step, FileSystem& files) {
  try {
    const std::vector<ListedFile> listed = read_sidecar(step, files);
    return std::all_of(listed.begin(), listed.end(), [&](const ListedFile& file) { return fault_of(step, file, files).empty(); });
  } catch (const Error&) {
    return false;
  }
}

std::vector<fs::path> complete_steps(const fs::path& folder, FileSystem& files) {
  if (!is_there(folder)) return {};
  std::vector<std::tuple<std::uint64_t, std::string, fs::path>> found;
  for (const std::string& entry : list_folder(folder)) {
    std::string name = entry;
    if (const std::string_view replaced = name_in(entry, kReplaced); !replaced.empty()) {
      name = replaced;
      if (is_there(folder / name)) continue;
    } else if (entry.starts_with('.')) {
      continue;
    }
    const std::optional<std::uint64_t> number = step_number(name);
    if (number && is_complete(folder / entry, files)) found.emplace_back(*number, name, folder / entry);
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> steps;
  steps.reserve(found.size());
  for (auto& [number, name, path] : found) steps.push_back(std::move(path));
  return steps;
}

std::optional<fs::path> latest_step(const fs::path& folder, FileSystem& files) {
  const std::vector<fs::path> steps = complete_steps(folder, files);
  if (steps.empty()) return std::nullopt;
  return steps.back();
}

void prune_steps(const fs::path& folder, int keep_last, FileSystem& files) {
  if (keep_last < 1) throw Error("keep_last is " + std::to_string(keep_last) + "; give 1 or more: the newest checkpoint is not removed");
  for (const std::string& entry : list_folder(folder)) {
    if (!name_in(entry, kTemporary).empty()) {
      remove_tree(folder / entry, files);
    } else if (const std::string_view name = name_in(entry, kReplaced); !name.empty()) {
      if (!is_there(folder / name) && is_complete(folder / entry, files)) {
        rename_to(folder / entry, folder / name, 0, files);
      } else {
        remove_step(folder / entry, files);
      }
    }
  }
  std::vector<fs::path> steps = complete_steps(folder, files);
  const std::size_t kept = std::min(steps.size(), static_cast<std::size_t>(keep_last));
  steps.resize(steps.size() - kept);
  for (const fs::path& step : steps) remove_step(step, files);
  sync_folder(folder, files);
}

std::int64_t blocks_of(std::int64_t size) { return size / kSummedBlock + (size % kSummedBlock != 0 ? 1 : 0); }

std::uint32_t sum_of_block(const File& file, std::int64_t size, std::size_t block, std::span<char> scratch) {
  const std::int64_t begin = static_cast<std::int64_t>(block) * kSummedBlock;
  const std::int64_t end = std::min(begin + kSummedBlock, size);
  std::uint32_t sum = 0;
  for (std::int64_t at = begin; at < end;) {
    const auto length = std::min({scratch.size(), kReadAtOnce, static_cast<std::size_t>(end - at)});
    const bool fits = scratch.size() >= static_cast<std::size_t>(end - begin);
    const auto part = scratch.subspan(fits ? static_cast<std::size_t>(at - begin) : 0, length);
    file.read_at(at, part);
    sum = crc32(sum, part);
    at += static_cast<std::int64_t>(part.size());
  }
  return sum;
}

std::string fault_in_block(const File& file, const ListedFile& listed, std::size_t block, std::span<char> scratch) {
  const std::uint32_t sum = sum_of_block(file, listed.size, block, scratch);
  if (sum == listed.crc32[block]) return "";
  const std::int64_t begin = static_cast<std::int64_t>(block) * kSummedBlock;
  const std::int64_t end = std::min(begin + kSummedBlock, listed.size);
  return listed.name + " has the checksum " + hexadecimal(sum) + " instead of " + hexadecimal(listed.crc32[block]) + " in bytes " +
         std::to_string(begin) + " to " + std::to_string(end - 1) + ": they changed";
}

std::string fault_in(const fs::path& step, const ListedFile& listed, FileSystem& files) {
  std::string fault = fault_of(step, listed, files);
  if (!fault.empty()) return fault;
  try {
    const File file = File::open(step / listed.name, files);
    std::vector<char> scratch(kReadAtOnce);
    for (std::size_t block = 0; block < listed.crc32.size() && fault.empty(); ++block) {
      fault = fault_in_block(file, listed, block, scratch);
    }
    return fault;
  } catch (const Error& error) {
    return error.what();
  }
}

void verify_step(const fs::path& step, FileSystem& files) {
  std::string faults;
  for (const ListedFile& listed : read_sidecar(step, files)) {
    const std::string fault = fault_in(step, listed, files);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  if (!faults.empty()) throw Error("the checkpoint " + step.string() + " is damaged; load an older one:" + faults);
}

}  // namespace fsdp::ckpt
