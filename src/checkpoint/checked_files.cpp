#include "checkpoint/checked_files.h"

#include <algorithm>
#include <utility>

#include "checkpoint/checksum.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {

std::span<char> BlockMemory::find(const CheckedFile& file, std::size_t index) {
  for (Block& block : blocks_) {
    if (block.file != &file || block.index != index) continue;
    block.used = ++uses_;
    return block.scratch.bytes();
  }
  return {};
}

BlockMemory::Block& BlockMemory::oldest_block() {
  return *std::min_element(blocks_.begin(), blocks_.end(), [](const Block& a, const Block& b) { return a.used < b.used; });
}

std::span<char> BlockMemory::oldest() {
  Block& block = oldest_block();
  block.file = nullptr;  // until keep(): reading it may fail
  return block.scratch.bytes();
}

void BlockMemory::keep(const CheckedFile& file, std::size_t index) {
  Block& block = oldest_block();
  block.file = &file;
  block.index = index;
  block.used = ++uses_;
}

CheckedFile::CheckedFile(const std::filesystem::path& path, const ListedFile* listed, BlockMemory& memory, FileSystem& files)
    : file_(File::open(path, files)), size_(file_.size()), listed_(listed), memory_(memory) {
  if (listed_ != nullptr && listed_->size != size_) {
    fail(listed_->name + " has " + std::to_string(size_) + " bytes instead of " + std::to_string(listed_->size));
  }
  is_checked_.resize(static_cast<std::size_t>(blocks_of(size_)));
}

void CheckedFile::fail(const std::string& fault) const {
  throw DamageError("the checkpoint " + file_.path().parent_path().string() + " is damaged; load an older one: " + fault);
}

void CheckedFile::check_block(std::size_t block, std::span<char> scratch) {
  const std::string fault = fault_in_block(file_, *listed_, block, scratch);
  if (!fault.empty()) fail(fault);
  is_checked_[block] = true;
}

std::span<const char> CheckedFile::load(std::size_t block) {
  auto bytes = memory_.find(*this, block);
  if (bytes.empty()) {
    bytes = memory_.oldest();
    check_block(block, bytes);
    memory_.keep(*this, block);
  }
  const auto begin = static_cast<std::int64_t>(block) * kSummedBlock;
  return bytes.first(static_cast<std::size_t>(std::min(kSummedBlock, size_ - begin)));
}

std::uint32_t CheckedFile::check(std::int64_t offset, std::int64_t length) {
  if (length <= 0) return 0;
  // Beyond the end there is nothing to check; who reads there gets an error.
  const std::int64_t begin = std::clamp<std::int64_t>(offset, 0, size_);
  const std::int64_t end = length > size_ - begin ? size_ : begin + length;
  std::uint32_t sum = 0;
  for (std::int64_t at = begin; at < end;) {
    const auto block = static_cast<std::size_t>(at / kSummedBlock);
    const auto block_begin = at / kSummedBlock * kSummedBlock;
    const auto next = std::min(end, block_begin + kSummedBlock);
    const auto count = static_cast<std::size_t>(next - at);
    if (listed_ == nullptr) {
      // Nothing to compare it with here.
      const auto bytes = memory_.passing().first(count);
      file_.read_at(at, bytes);
      sum = crc32(sum, bytes);
      at += static_cast<std::int64_t>(bytes.size());
      continue;
    }
    const bool is_whole = at == block_begin && next == std::min(size_, block_begin + kSummedBlock);
    std::uint32_t part = 0;
    if (is_whole) {
      if (!is_checked_[block]) check_block(block, memory_.passing());
      part = listed_->crc32[block];
    } else {
      part = crc32(0, load(block).subspan(static_cast<std::size_t>(at - block_begin), count));
    }
    sum = combine_crc32(sum, part, count);
    at = next;
  }
  return sum;
}

ReadAt CheckedFile::reader() {
  return [this](std::int64_t offset, std::span<char> to) {
    const std::uint32_t sum = check(offset, static_cast<std::int64_t>(to.size()));
    read_at(offset, to);
    if (crc32(0, to) != sum) fail(file_.path().filename().string() + " changed while it was read");
  };
}

CheckedFiles::CheckedFiles(std::filesystem::path folder, FileSystem& files)
    : folder_(std::move(folder)), files_(files), has_sidecar_(is_there(folder_ / kSidecar, files_)) {
  if (!has_sidecar_) return;
  for (SidecarEntry& listed : read_sidecar(folder_, files_).files) {
    const std::string name = listed.name;
    listed_.emplace(name, std::move(listed));
  }
}

CheckedFile& CheckedFiles::operator[](const std::string& name) {
  if (const auto found = open_.find(name); found != open_.end()) return found->second;
  const auto listed = listed_.find(name);
  const bool is_listed = listed != listed_.end();
  if (has_sidecar_ && !is_listed) throw Error((folder_ / kSidecar).string() + " does not list the file " + name);
  const ListedFile* sums = is_listed ? &(sums_[name] = read_sums(folder_, listed->second, files_)) : nullptr;
  return open_.try_emplace(name, folder_ / name, sums, memory_, files_).first->second;
}

std::string CheckedFiles::read_whole(const std::string& name, std::int64_t most) {
  CheckedFile& file = (*this)[name];
  const std::uint32_t sum = file.check(0, most);
  std::string content = ckpt::read_whole(folder_ / name, most, files_);
  if (crc32(0, content) != sum) file.fail(name + " changed while it was read");
  return content;
}

}  // namespace fsdp::ckpt
