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

void CheckedFile::compare(std::size_t block, std::uint32_t sum) {
  const std::string fault = fault_in_block(*listed_, block, sum);
  if (!fault.empty()) fail(fault);
  is_checked_[block] = true;
}

std::span<const char> CheckedFile::load(std::size_t block) {
  const auto begin = static_cast<std::int64_t>(block) * kSummedBlock;
  const auto count = static_cast<std::size_t>(std::min(kSummedBlock, size_ - begin));
  if (const auto bytes = memory_.find(*this, block); !bytes.empty()) return bytes.first(count);
  const auto bytes = memory_.oldest().first(count);
  compare(block, read_summed(file_, begin, bytes, 0));
  memory_.keep(*this, block);
  return bytes;
}

std::uint32_t CheckedFile::check(std::int64_t offset, std::int64_t length) {
  // There is nothing to check beyond the end of the file; reading there is an error.
  const std::int64_t begin = std::clamp<std::int64_t>(offset, 0, size_);
  return pass(begin, std::min(length, size_ - begin), nullptr);
}

std::uint32_t CheckedFile::read(std::int64_t offset, std::span<char> to) {
  const auto length = static_cast<std::int64_t>(to.size());
  if (offset < 0 || length > size_ - offset) {
    file_.read_at(offset, to);  // Throws, unless the file has grown.
    fail(file_.path().filename().string() + " grew while it was read");
  }
  return pass(offset, length, to.data());
}

std::uint32_t CheckedFile::pass(std::int64_t offset, std::int64_t length, char* to) {
  std::uint32_t sum = 0;
  for (std::int64_t done = 0; done < length;) {
    const auto at = offset + done;
    const auto block = static_cast<std::size_t>(at / kSummedBlock);
    const auto block_begin = at / kSummedBlock * kSummedBlock;
    const auto next = std::min(offset + length, block_begin + kSummedBlock);
    const auto count = static_cast<std::size_t>(next - at);
    const auto place = to == nullptr ? memory_.passing().first(count) : std::span(to + done, count);
    done += next - at;
    if (listed_ == nullptr) {
      sum = read_summed(file_, at, place, sum);  // There is nothing to compare it with here.
      continue;
    }
    const bool is_whole = at == block_begin && next == std::min(size_, block_begin + kSummedBlock);
    std::uint32_t part = 0;
    if (is_whole) {
      // Bytes that are kept are compared on this very reading.
      if (to != nullptr) {
        compare(block, read_summed(file_, at, place, 0));
      } else if (!is_checked_[block]) {
        compare(block, sum_of_block(file_, size_, block, place));
      }
      part = listed_->crc32[block];
    } else {
      const auto bytes = load(block).subspan(static_cast<std::size_t>(at - block_begin), count);
      if (to != nullptr) std::copy(bytes.begin(), bytes.end(), place.begin());
      part = crc32(0, bytes);
    }
    sum = combine_crc32(sum, part, count);
  }
  return sum;
}

ReadAt CheckedFile::reader() {
  return [this](std::int64_t offset, std::span<char> to) { read(offset, to); };
}

CheckedFiles::CheckedFiles(const std::filesystem::path& folder, FileSystem& files)
    : CheckedFiles([folder](const std::string& name) { return folder / name; }, files) {}

CheckedFiles::CheckedFiles(PathOf path_of, FileSystem& files)
    : path_of_(std::move(path_of)), files_(files), has_sidecar_(is_there(path_of_(std::string(kSidecar)), files_)) {
  if (!has_sidecar_) return;
  auto sidecar = read_sidecar(sidecar_folder(), files_);
  saved_ = sidecar.saved;
  for (SidecarEntry& listed : sidecar.files) {
    const std::string name = listed.name;
    listed_.emplace(name, std::move(listed));
  }
}

CheckedFile& CheckedFiles::operator[](const std::string& name) {
  if (const auto found = open_.find(name); found != open_.end()) return found->second;
  const auto listed = listed_.find(name);
  const bool is_listed = listed != listed_.end();
  if (has_sidecar_ && !is_listed) throw Error((sidecar_folder() / kSidecar).string() + " does not list the file " + name);
  const ListedFile* sums = is_listed ? &(sums_[name] = read_sums(sidecar_folder(), listed->second, files_)) : nullptr;
  return open_.try_emplace(name, path_of_(name), sums, memory_, files_).first->second;
}

std::string CheckedFiles::read_whole(const std::string& name, std::int64_t most) {
  CheckedFile& file = (*this)[name];
  const std::uint32_t sum = file.check(0, most);
  std::string content = ckpt::read_whole(file.file().path(), most, files_);
  if (crc32(0, content) != sum) file.fail(name + " changed while it was read");
  return content;
}

}  // namespace fsdp::ckpt
