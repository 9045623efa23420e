#include "checkpoint/checked_files.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::ckpt {

CheckedFile::CheckedFile(const std::filesystem::path& path, const ListedFile* listed, std::span<char> scratch, FileSystem& files)
    : file_(File::open(path, files)), size_(file_.size()), listed_(listed), scratch_(scratch) {
  if (listed_ != nullptr && listed_->size != size_) {
    fail(listed_->name + " has " + std::to_string(size_) + " bytes instead of " + std::to_string(listed_->size));
  }
  is_checked_.resize(static_cast<std::size_t>(blocks_of(size_)));
}

void CheckedFile::fail(const std::string& fault) const {
  throw DamageError("the checkpoint " + file_.path().parent_path().string() + " is damaged; load an older one: " + fault);
}

void CheckedFile::check(std::int64_t offset, std::int64_t length) {
  if (length <= 0) return;
  // Beyond the end there is nothing to check; who reads there gets an error.
  const std::int64_t begin = std::clamp<std::int64_t>(offset, 0, size_);
  const std::int64_t end = length > size_ - begin ? size_ : begin + length;
  for (std::int64_t block = begin / kSummedBlock; block * kSummedBlock < end; ++block) {
    const auto index = static_cast<std::size_t>(block);
    if (is_checked_[index]) continue;
    if (listed_ != nullptr) {
      const std::string fault = fault_in_block(file_, *listed_, index, scratch_);
      if (!fault.empty()) fail(fault);
    } else {
      sum_of_block(file_, size_, index, scratch_);  // Nothing to compare it with: that it can be read is all.
    }
    is_checked_[index] = true;
  }
}

ReadAt CheckedFile::reader() {
  return [this](std::int64_t offset, std::span<char> to) {
    check(offset, static_cast<std::int64_t>(to.size()));
    read_at(offset, to);
  };
}

CheckedFiles::CheckedFiles(std::filesystem::path folder, FileSystem& files)
    : folder_(std::move(folder)), files_(files), has_sidecar_(is_there(folder_ / kSidecar, files_)), scratch_(kReadAtOnce) {
  if (!has_sidecar_) return;
  for (ListedFile& listed : read_sidecar(folder_, files_).files) {
    const std::string name = listed.name;
    listed_.emplace(name, std::move(listed));
  }
}

CheckedFile& CheckedFiles::operator[](const std::string& name) {
  if (const auto found = open_.find(name); found != open_.end()) return found->second;
  const auto listed = listed_.find(name);
  const bool is_listed = listed != listed_.end();
  if (has_sidecar_ && !is_listed) throw Error((folder_ / kSidecar).string() + " does not list the file " + name);
  return open_.try_emplace(name, folder_ / name, is_listed ? &listed->second : nullptr, scratch_, files_).first->second;
}

std::string CheckedFiles::read_whole(const std::string& name, std::int64_t most) {
  (*this)[name].check(0, most);
  return ckpt::read_whole(folder_ / name, most, files_);
}

}  // namespace fsdp::ckpt
