#include "checkpoint/commit.h"

#include <linux/fs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/digits.h"
#include "checkpoint/output_file.h"
#include "checkpoint/scratch.h"
#include "checkpoint/step_names.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

// The number of bytes after which writing to the disk is started. By itself, Linux begins when a tenth of the memory is dirty, or at fsync.
constexpr std::int64_t kStarted = std::int64_t{8} << 20;
/// Smaller pieces are joined to writes of this size.
constexpr std::size_t kJoined = std::size_t{1} << 20;

// The sidecar: a head of text, "fsdp-checksums 3 <its length>", "saved <number>", a line per file, "end <CRC-32 of the lines before>"; then
// all files' checksums, in the order of the lines. The length has a fixed width, so that it can be read first.
constexpr std::string_view kFirstWords = "fsdp-checksums 3 ";
constexpr std::size_t kLengthDigits = 12;
constexpr std::size_t kFirstLine = kFirstWords.size() + kLengthDigits + 1;
constexpr std::string_view kSaved = "saved ";
// Some 30 bytes per file.
constexpr std::int64_t kMostHead = std::int64_t{64} << 20;
constexpr std::size_t kLastLine = 4 + kHexDigits + 1;
constexpr std::size_t kSumBytes = 4;

bool is_empty_folder(const fs::path& path, FileSystem& files) { return is_folder(path, files) && list_folder(path, files).empty(); }

/// Throws Error unless what is at `step` may go: a checkpoint, an empty folder, or nothing.
void check_replaceable(const fs::path& step, FileSystem& files) {
  if (!is_there(step, files) || is_there(step / kSidecar, files) || is_there(step / kMetadataFile, files)) return;
  if (is_empty_folder(step, files)) return;
  throw Error(step.string() + " is there and is no checkpoint: it is not overwritten; give another name, or remove it");
}

void require_path(const fs::path& target) {
  if (target.empty()) throw Error("the path to save to is empty; give the name of a new folder");
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

/// The greatest number of a step that this process has saved or loaded.
std::atomic<std::int64_t> greatest_saved = 0;

std::string other_size(const std::string& name, std::int64_t size, std::int64_t listed) {
  return name + " has " + std::to_string(size) + " bytes instead of " + std::to_string(listed);
}

/// Throws Error unless the name is that of a file directly in the step's folder.
const std::string& checked_name(const std::string& name) {
  if (name.empty() || name.find_first_of("/\n") != std::string::npos) throw Error("'" + name + "' is no name for a file of a checkpoint");
  return name;
}

/// "<size> <name> <CRC-32 of its checksums>": a name may have spaces, what stands around it has none.
std::optional<SidecarEntry> entry_in(std::string_view line) {
  const std::size_t before_name = line.find(' ');
  const std::size_t after_name = line.rfind(' ');
  if (before_name == std::string_view::npos || before_name + 1 >= after_name) return std::nullopt;
  const auto size = number_in<std::int64_t>(line.substr(0, before_name));
  const auto sums = number_in<std::uint32_t>(line.substr(after_name + 1), 16);
  SidecarEntry entry{.name = std::string(line.substr(before_name + 1, after_name - before_name - 1))};
  if (!size || !sums || line.size() - after_name - 1 != kHexDigits || entry.name.find('/') != std::string::npos) return std::nullopt;
  entry.size = *size;
  entry.sums_crc32 = *sums;
  return entry;
}

void append_sum(std::string& bytes, std::uint32_t sum) {
  for (std::size_t i = 0; i < kSumBytes; ++i) bytes += static_cast<char>(sum >> (8 * i));
}

std::uint32_t sum_at(std::string_view bytes, std::size_t at) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < kSumBytes; ++i) sum |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  return sum;
}

}  // namespace

void make_folders(const fs::path& path, FileSystem& files) {
  if (is_there(path, files)) return;
  make_folders(parent_of(path), files);
  // Another process may have been faster.
  if (files.mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) throw_errno("create the folder", path);
  sync_folder(parent_of(path), files);
}

// "<size> <name> <checksums>": a name may have spaces, what stands around it has none.
std::string line_of(const ListedFile& listed) {
  std::string line = std::to_string(listed.size) + " " + checked_name(listed.name) + " ";
  line.reserve(line.size() + listed.crc32.size() * kHexDigits);
  for (const std::uint32_t sum : listed.crc32) line += hexadecimal(sum);
  return line;
}

ListedFile listed_in(std::string_view line) {
  const auto fail = [line] { throw Error("the line '" + std::string(line.substr(0, 200)) + "' is no file's"); };
  const std::size_t before_name = line.find(' ');
  const std::size_t after_name = line.rfind(' ');
  if (before_name == std::string_view::npos || before_name + 1 >= after_name) fail();
  ListedFile listed{std::string(line.substr(before_name + 1, after_name - before_name - 1))};
  const auto size = number_in<std::int64_t>(line.substr(0, before_name));
  std::string_view sums = line.substr(after_name + 1);
  listed.size = size.value_or(0);
  const bool has_sums = sums.size() % kHexDigits == 0 && static_cast<std::int64_t>(sums.size() / kHexDigits) == blocks_of(listed.size);
  if (!size || listed.name.find('/') != std::string::npos || !has_sums) fail();
  for (; !sums.empty(); sums.remove_prefix(kHexDigits)) {
    const auto sum = number_in<std::uint32_t>(sums.substr(0, kHexDigits), 16);
    if (!sum) fail();
    listed.crc32.push_back(*sum);
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
  require_path(target);
  const fs::path step = follow_links(target, files);
  check_replaceable(step, files);
  return make_temporary(step, files);
}

TemporaryStep begin_new(const fs::path& target, FileSystem& files) {
  require_path(target);
  const fs::path folder = follow_links(target, files);
  check_free(folder, files);
  return make_temporary(folder, files);
}

void commit_new(const fs::path& temporary, const fs::path& target, FileSystem& files) {
  const fs::path folder = follow_links(target, files);
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
  lease_.reset();  // The lease has a file open there, which some file systems do not remove.
  remove_quietly(path_);
}

void note_saved(std::int64_t saved) {
  std::int64_t greatest = greatest_saved;
  while (greatest < saved && !greatest_saved.compare_exchange_weak(greatest, saved)) {
  }
}

std::int64_t new_saved() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::int64_t time = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  std::int64_t greatest = greatest_saved;
  while (!greatest_saved.compare_exchange_weak(greatest, std::max(time, greatest + 1))) {
  }
  return std::max(time, greatest + 1);
}

std::int64_t next_saved(const fs::path& folder, FileSystem& files, std::int64_t saved) {
  if (saved == 0) saved = new_saved();
  for (const std::string& name : list_folder(folder, files)) {
    if (!step_name(name)) continue;
    try {
      saved = std::max(saved, read_sidecar(folder / name, files).saved + 1);
    } catch (const Error&) {
      // It is not a step, or cannot be read, so the clock must do.
    }
  }
  note_saved(saved);
  return saved;
}

void seal_step(const fs::path& temporary, std::span<const ListedFile> listed, FileSystem& files, std::int64_t saved) {
  if (saved == 0) saved = next_saved(parent_of(temporary), files);
  std::vector<std::string> sums;
  std::string lines = std::string(kSaved) + std::to_string(saved) + "\n";
  for (const ListedFile& file : listed) {
    std::string& bytes = sums.emplace_back();
    bytes.reserve(file.crc32.size() * kSumBytes);
    for (const std::uint32_t sum : file.crc32) append_sum(bytes, sum);
    lines += std::to_string(file.size) + " " + checked_name(file.name) + " " + hexadecimal(crc32(0, bytes)) + "\n";
  }
  const std::size_t length = kFirstLine + lines.size() + kLastLine;
  std::string head = std::string(kFirstWords) + padded(length, kLengthDigits) + "\n" + lines;
  head += "end " + hexadecimal(crc32(0, head)) + "\n";
  File sidecar = File::create(temporary / kSidecar, files);
  auto end = static_cast<std::int64_t>(head.size());
  sidecar.write_at(0, head);
  for (const std::string& bytes : sums) {
    sidecar.write_at(end, bytes);
    end += static_cast<std::int64_t>(bytes.size());
  }
  sidecar.sync();
  sidecar.close();
  sync_folder(temporary, files);
}

fs::path commit_step(const fs::path& temporary, const fs::path& target, FileSystem& files) {
  const fs::path step = follow_links(target, files);
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
  // It stops being a step before its files are removed one by one.
  const fs::path doomed = hidden_name(step, kTemporaryPrefix);
  return files.rename(replaced.c_str(), doomed.c_str(), 0) == 0 ? doomed : replaced;
}

Sidecar read_sidecar(const ReadAt& read, std::int64_t size, const std::string& file) {
  const auto fail = [&file](const std::string& why) { throw DamageError(file + " is damaged: " + why); };
  std::string head(kFirstLine, '\0');
  if (size < static_cast<std::int64_t>(kFirstLine + kLastLine)) fail("it is cut off");
  read(0, head);
  if (!head.starts_with(kFirstWords)) fail("it does not begin with '" + std::string(kFirstWords) + "'");
  const auto length = number_in<std::int64_t>(std::string_view(head).substr(kFirstWords.size(), kLengthDigits));
  if (!length || *length < static_cast<std::int64_t>(kFirstLine + kLastLine) || *length > std::min(size, kMostHead)) {
    fail("it does not say how long its head is");
  }
  head.resize(static_cast<std::size_t>(*length));
  read(0, head);
  const std::string_view lines = std::string_view(head).substr(0, head.size() - kLastLine);
  if (head.substr(lines.size()) != "end " + hexadecimal(crc32(0, lines)) + "\n") fail("its last line does not fit the others");

  Sidecar sidecar;
  std::int64_t sums_begin = *length;
  std::string_view rest = lines.substr(kFirstLine);
  const auto next_line = [&rest] {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    return line;
  };
  const std::string_view first = next_line();
  const auto saved = first.starts_with(kSaved) ? number_in<std::int64_t>(first.substr(kSaved.size())) : std::nullopt;
  if (!saved) fail("it does not say when it was saved");
  sidecar.saved = *saved;
  while (!rest.empty()) {
    std::optional<SidecarEntry> entry = entry_in(next_line());
    if (!entry) fail("a line is no file's");
    entry->sums_begin = sums_begin;
    const std::int64_t sums = blocks_of(entry->size) * kSumBytes;
    if (sums > size - sums_begin) fail("checksums are missing");
    sums_begin += sums;
    sidecar.files.push_back(*std::move(entry));
  }
  if (sums_begin != size) fail("it has " + std::to_string(size) + " bytes instead of " + std::to_string(sums_begin));
  return sidecar;
}

Sidecar read_sidecar(const fs::path& step, FileSystem& files) {
  const File file = File::open(step / kSidecar, files);
  return read_sidecar(file.reader(), file.size(), file.path().string());
}

ListedFile read_sums(const fs::path& step, const SidecarEntry& entry, FileSystem& files) {
  const File sidecar = File::open(step / kSidecar, files);
  std::string bytes(static_cast<std::size_t>(blocks_of(entry.size) * kSumBytes), '\0');
  sidecar.read_at(entry.sums_begin, bytes);
  if (crc32(0, bytes) != entry.sums_crc32) throw DamageError(sidecar.path().string() + " is damaged: the checksums of " + entry.name);
  ListedFile listed{entry.name, entry.size};
  for (std::size_t at = 0; at < bytes.size(); at += kSumBytes) listed.crc32.push_back(sum_at(bytes, at));
  return listed;
}

std::string fault_in_sizes(const fs::path& step, const Sidecar& sidecar, FileSystem& files) {
  try {
    for (const SidecarEntry& listed : sidecar.files) {
      struct stat status {};
      if (files.stat((step / listed.name).c_str(), &status) != 0) throw_errno("look at", step / listed.name);
      if (status.st_size != listed.size) return other_size(listed.name, status.st_size, listed.size);
    }
    return "";
  } catch (const SystemError& error) {
    if (!error.is_missing()) throw;
    return error.what();
  }
}

std::string fault_in_sizes(const fs::path& step, FileSystem& files) {
  try {
    return fault_in_sizes(step, read_sidecar(step, files), files);
  } catch (const SystemError& error) {
    if (!error.is_missing()) throw;
    return error.what();
  } catch (const DamageError& error) {
    return error.what();
  }
}

std::int64_t blocks_of(std::int64_t size) { return size / kSummedBlock + (size % kSummedBlock != 0 ? 1 : 0); }

namespace {

/// The number of bytes that are read and summed at a time, so that they are still in the core's own cache when they are summed.
constexpr std::size_t kSummedAtOnce = std::size_t{1} << 18;

}  // namespace

std::uint32_t read_summed(const File& file, std::int64_t offset, std::span<char> to, std::uint32_t sum) {
  while (!to.empty()) {
    const auto part = to.first(std::min(to.size(), kSummedAtOnce));
    file.read_at(offset, part);
    sum = crc32(sum, part);
    offset += static_cast<std::int64_t>(part.size());
    to = to.subspan(part.size());
  }
  return sum;
}

std::uint32_t sum_of_block(const File& file, std::int64_t size, std::size_t block, std::span<char> scratch) {
  const std::int64_t begin = static_cast<std::int64_t>(block) * kSummedBlock;
  const std::int64_t end = std::min(begin + kSummedBlock, size);
  std::uint32_t sum = 0;
  for (std::int64_t at = begin; at < end;) {
    const auto part = scratch.first(std::min(static_cast<std::size_t>(end - at), kSummedAtOnce));
    sum = read_summed(file, at, part, sum);
    at += static_cast<std::int64_t>(part.size());
  }
  return sum;
}

std::string fault_in_block(const ListedFile& listed, std::size_t block, std::uint32_t sum) {
  if (sum == listed.crc32[block]) return "";
  const std::int64_t begin = static_cast<std::int64_t>(block) * kSummedBlock;
  const std::int64_t end = std::min(begin + kSummedBlock, listed.size);
  return listed.name + " has the checksum " + hexadecimal(sum) + " instead of " + hexadecimal(listed.crc32[block]) + " in bytes " +
         std::to_string(begin) + " to " + std::to_string(end - 1) + ": they changed";
}

std::string fault_in(const fs::path& step, const SidecarEntry& entry, FileSystem& files) {
  try {
    const File file = File::open(step / entry.name, files);
    if (file.size() != entry.size) return other_size(entry.name, file.size(), entry.size);
    const ListedFile listed = read_sums(step, entry, files);
    Scratch scratch(kSummedBlock);
    std::string fault;
    for (std::size_t block = 0; block < listed.crc32.size() && fault.empty(); ++block) {
      fault = fault_in_block(listed, block, sum_of_block(file, listed.size, block, scratch.bytes()));
    }
    return fault;
  } catch (const Error& error) {
    return error.what();
  }
}

void verify_step(const fs::path& step, FileSystem& files) {
  std::string faults;
  for (const SidecarEntry& listed : read_sidecar(step, files).files) {
    const std::string fault = fault_in(step, listed, files);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  if (!faults.empty()) throw DamageError("the checkpoint " + step.string() + " is damaged; load an older one:" + faults);
}

}  // namespace fsdp::ckpt
