#include "checkpoint/commit.h"

#include <linux/fs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/step_names.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

// So much is given to the disk at once. Linux alone would begin when a tenth of the memory waits, or at fsync.
constexpr std::int64_t kStarted = std::int64_t{8} << 20;
/// So much is written at once where pieces are smaller.
constexpr std::size_t kJoined = std::size_t{1} << 20;

// A line per file, 8 digits per block: enough for 32 TB.
constexpr std::int64_t kMostSidecar = std::int64_t{256} << 20;
constexpr std::string_view kFirstLine = "fsdp-checksums 3";
constexpr std::string_view kSaved = "saved ";
constexpr std::size_t kDigits = 8;  // of a checksum

std::string hexadecimal(std::uint32_t value) {
  char text[kDigits + 1];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

void make_folders(const fs::path& path, FileSystem& files) {
  if (is_there(path, files)) return;
  make_folders(parent_of(path), files);
  // Another process may have been faster.
  if (files.mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) throw_errno("create the folder", path);
  sync_folder(parent_of(path), files);
}

bool is_empty_folder(const fs::path& path, FileSystem& files) { return is_folder(path, files) && list_folder(path, files).empty(); }

/// Throws Error unless what is at `step` may go: a checkpoint, an empty folder, or nothing.
void check_replaceable(const fs::path& step, FileSystem& files) {
  if (!is_there(step, files) || is_there(step / kSidecar, files) || is_there(step / kMetadataFile, files)) return;
  if (is_empty_folder(step, files)) return;
  throw Error(step.string() + " is there and is no checkpoint: it is not overwritten; give another name, or remove it");
}

/// Throws Error unless nothing is at `path`, or an empty folder.
void check_free(const fs::path& path, FileSystem& files) {
  if (!is_there(path, files) || is_empty_folder(path, files)) return;
  throw Error(path.string() + " is there already, and what is written here replaces nothing; give another name, or remove it");
}

TemporaryStep make_temporary(const fs::path& step, FileSystem& files) {
  make_folders(parent_of(step), files);
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    fs::path temporary = hidden_name(step, kTemporaryPrefix);
    if (files.mkdir(temporary.c_str(), 0777) == 0) {
      try {
        Lease lease(temporary, files);
        return {std::move(temporary), std::move(lease)};
      } catch (const Error&) {
        remove_quietly(temporary, files);
        throw;
      }
    }
    if (errno != EEXIST || attempt == kAttempts) throw_errno("create the folder", temporary);
  }
}

/// Later than what any step of the folder says, whatever the clocks of the machines that wrote them.
std::int64_t next_saved(const fs::path& folder, FileSystem& files) {
  std::int64_t latest = 0;
  for (const std::string& name : list_folder(folder, files)) {
    if (!step_name(name)) continue;
    try {
      latest = std::max(latest, read_sidecar(folder / name, files).saved);
    } catch (const Error&) {
      // No step, or one that cannot be read: the clock has to do.
    }
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::max<std::int64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), latest + 1);
}

std::string other_size(const ListedFile& listed, std::int64_t size) {
  return listed.name + " has " + std::to_string(size) + " bytes instead of " + std::to_string(listed.size);
}

/// What is wrong with a listed file; empty if nothing is, as far as can be seen without reading it.
std::string fault_of(const fs::path& step, const ListedFile& listed, FileSystem& files) {
  try {
    const std::int64_t size = File::open(step / listed.name, files).size();
    if (size == listed.size) return "";
    return other_size(listed, size);
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

TemporaryStep begin_step(const fs::path& target, FileSystem& files) {
  const fs::path step = without_slash(target);
  check_replaceable(step, files);
  return make_temporary(step, files);
}

TemporaryStep begin_new(const fs::path& target, FileSystem& files) {
  const fs::path folder = without_slash(target);
  check_free(folder, files);
  return make_temporary(folder, files);
}

void commit_new(const fs::path& temporary, const fs::path& target, FileSystem& files) {
  const fs::path folder = without_slash(target);
  check_free(folder, files);
  rename_to(temporary, folder, 0, files);
  try {
    sync_folder(parent_of(folder), files);
  } catch (const Error&) {
    files.rename(folder.c_str(), temporary.c_str(), 0);
    throw;
  }
  files.unlink((folder / kOwnerFile).c_str());
}

void TemporaryStep::discard() noexcept {
  lease_.reset();  // It has a file open there, which some file systems do not remove.
  remove_quietly(path_);
}

void seal_step(const fs::path& temporary, std::span<const ListedFile> listed, FileSystem& files) {
  std::string text = std::string(kFirstLine) + "\n" + std::string(kSaved) + std::to_string(next_saved(parent_of(temporary), files)) + "\n";
  for (const ListedFile& file : listed) text += line_of(file) + "\n";
  text += "end " + hexadecimal(crc32(0, text)) + "\n";
  write_whole(temporary / kSidecar, text, files);
  sync_folder(temporary, files);
}

fs::path commit_step(const fs::path& temporary, const fs::path& target, FileSystem& files) {
  const fs::path step = without_slash(target);
  const fs::path parent = parent_of(step);
  check_replaceable(step, files);
  /// Syncs what was renamed, or undoes it: on a disk that fails, the names as they were are the safer ones.
  const auto sync_or = [&](auto undo) {
    try {
      sync_folder(parent, files);
    } catch (const Error&) {
      undo();
      throw;
    }
  };
  if (!is_there(step, files)) {
    rename_to(temporary, step, 0, files);
    sync_or([&] { files.rename(step.c_str(), temporary.c_str(), 0); });
    return {};
  }
  if (files.rename(temporary.c_str(), step.c_str(), RENAME_EXCHANGE) == 0) {
    sync_or([&] { files.rename(temporary.c_str(), step.c_str(), RENAME_EXCHANGE); });
    return temporary;
  }
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) throw_errno("exchange " + temporary.string() + " with", step);
  const fs::path replaced = hidden_name(step, kReplacedPrefix);
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
  const fs::path doomed = hidden_name(step, kTemporaryPrefix);
  return files.rename(replaced.c_str(), doomed.c_str(), 0) == 0 ? doomed : replaced;
}

Sidecar read_sidecar(const fs::path& step, FileSystem& files) {
  const fs::path path = step / kSidecar;
  const std::string text = read_whole(path, kMostSidecar, files);
  const auto fail = [&path](const std::string& why) { throw DamageError(path.string() + " is damaged: " + why); };
  // The last line sums the ones before.
  constexpr std::size_t kLastLine = 4 + kDigits + 1;
  if (!text.starts_with(std::string(kFirstLine) + "\n")) fail("it does not begin with '" + std::string(kFirstLine) + "'");
  if (text.size() < kFirstLine.size() + 1 + kLastLine) fail("it is cut off");
  const std::string lines = text.substr(0, text.size() - kLastLine);
  if (text.substr(lines.size()) != "end " + hexadecimal(crc32(0, lines)) + "\n") fail("its last line does not fit the others");

  Sidecar sidecar;
  std::string_view rest = lines;
  rest.remove_prefix(kFirstLine.size() + 1);
  const auto saved = std::from_chars(rest.data() + std::min(kSaved.size(), rest.size()), rest.data() + rest.size(), sidecar.saved);
  if (!rest.starts_with(kSaved) || saved.ec != std::errc() || *saved.ptr != '\n') fail("it does not say when it was saved");
  rest.remove_prefix(static_cast<std::size_t>(saved.ptr - rest.data()) + 1);
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    try {
      sidecar.files.push_back(listed_in(rest.substr(0, end)));
    } catch (const Error& error) {
      fail(error.what());
    }
    rest.remove_prefix(end + 1);
  }
  return sidecar;
}

std::string fault_in_sizes(const fs::path& step, FileSystem& files) {
  try {
    for (const ListedFile& listed : read_sidecar(step, files).files) {
      struct stat status {};
      if (files.stat((step / listed.name).c_str(), &status) != 0) throw_errno("look at", step / listed.name);
      if (status.st_size != listed.size) return other_size(listed, status.st_size);
    }
    return "";
  } catch (const SystemError& error) {
    if (!error.is_missing()) throw;
    return error.what();
  } catch (const DamageError& error) {
    return error.what();
  }
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
  for (const ListedFile& listed : read_sidecar(step, files).files) {
    const std::string fault = fault_in(step, listed, files);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  if (!faults.empty()) throw DamageError("the checkpoint " + step.string() + " is damaged; load an older one:" + faults);
}

}  // namespace fsdp::ckpt
