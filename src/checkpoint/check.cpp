#include "checkpoint/check.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "checkpoint/records.h"
#include "checkpoint/scratch.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

/// Runs `look`; what it throws is a fault.
template <typename Look>
void note(Findings& findings, Look look) {
  try {
    look();
  } catch (const Error& error) {
    findings.faults.emplace_back(error.what());
  }
}

void check_files(const fs::path& folder, FileSystem& files, Findings& findings) {
  for (const SidecarEntry& listed : read_sidecar(folder, files).files) {
    ++findings.files;
    std::string fault = fault_in(folder, listed, files);
    if (!fault.empty()) findings.faults.push_back(std::move(fault));
  }
}

/// Opens each file once; one that cannot be opened is one fault, however many records it should have.
class CheckedRecords {
 public:
  CheckedRecords(fs::path folder, FileSystem& files, Findings& findings) : folder_(std::move(folder)), files_(files), findings_(findings) {}

  /// Null if it is not there.
  const File* operator[](const std::string& name) {
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second.get();
    std::unique_ptr<File> file;
    note(findings_, [&] { file = std::make_unique<File>(File::open(folder_ / name, files_)); });
    return open_.emplace(name, std::move(file)).first->second.get();
  }

 private:
  fs::path folder_;
  FileSystem& files_;
  Findings& findings_;
  std::map<std::string, std::unique_ptr<File>> open_;
};

/// Checks a record's own checksum, the only one in checkpoints that Python wrote.
void check_data(const File& file, const TensorData& data, const std::string& name) {
  if (!data.stored.crc32) return;
  Scratch scratch(kSummedBlock);
  std::uint32_t sum = 0;
  for (std::int64_t done = 0; done < data.stored.length;) {
    const auto part = scratch.bytes().first(static_cast<std::size_t>(std::min(kSummedBlock, data.stored.length - done)));
    file.read_at(data.stored.offset + done, part);
    sum = crc32(sum, part);
    done += static_cast<std::int64_t>(part.size());
  }
  if (sum != *data.stored.crc32) throw Error(fault_in_record(file, data, name));
}

void check_item(const DcpItem& item, CheckedRecords& records, Findings& findings) {
  if (const auto* unreadable = std::get_if<DcpUnreadable>(&item.content)) {
    ++findings.tensors;
    findings.only_for_python.push_back("'" + item.name + "': " + unreadable->why);
    return;
  }
  if (const auto* object = std::get_if<DcpObject>(&item.content)) {
    ++findings.values;
    if (const File* file = records[object->record.file]) {
      note(findings, [&] {
        const std::string type = type_of_object(file->reader(), object->record, item.name);
        if (!type.empty()) findings.only_for_python.push_back("'" + item.name + "': " + type);
      });
    }
    return;
  }
  ++findings.tensors;
  const auto& tensor = std::get<DcpTensor>(item.content);
  for (const DcpTensor::Chunk& chunk : tensor.chunks) {
    if (chunk.record.file.empty()) continue;  // without elements
    if (const File* file = records[chunk.record.file]) {
      note(findings, [&] {
        const TensorData data = locate_tensor(file->reader(), chunk.record, item.name, tensor.dtype, chunk.box.sizes);
        if (!findings.has_checksums) check_data(*file, data, item.name);
      });
    }
  }
  const std::string fault = fault_in_boxes(tensor);
  if (!fault.empty()) findings.faults.push_back("'" + item.name + "': " + fault);
}

}  // namespace

std::string fault_in_boxes(const DcpTensor& tensor) {
  std::vector<const Box*> boxes;
  std::int64_t covered = 0;
  for (const DcpTensor::Chunk& chunk : tensor.chunks) {
    const std::int64_t count = numel(chunk.box.sizes);
    if (count == 0) continue;
    if (__builtin_add_overflow(covered, count, &covered)) return "its parts have more than 2^63 - 1 elements";
    boxes.push_back(&chunk.box);
  }
  // In the order of their beginnings along a dimension, a box can overlap only those that begin before its end. The dimension along which
  // most of them begin elsewhere leaves the fewest to compare.
  std::size_t along = 0;
  std::size_t most = 0;
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    std::set<std::int64_t> begins;
    for (const Box* box : boxes) begins.insert(box->offsets[d]);
    if (begins.size() > most) along = d;
    most = std::max(most, begins.size());
  }
  const auto begin = [&](const Box& box) { return box.offsets.empty() ? 0 : box.offsets[along]; };
  const auto end = [&](const Box& box) { return box.offsets.empty() ? 1 : box.offsets[along] + box.sizes[along]; };
  std::sort(boxes.begin(), boxes.end(), [&](const Box* a, const Box* b) { return begin(*a) < begin(*b); });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (std::size_t j = i + 1; j < boxes.size() && begin(*boxes[j]) < end(*boxes[i]); ++j) {
      if (intersection(*boxes[i], *boxes[j])) return "two of its parts overlap";
    }
  }
  const std::int64_t all = numel(tensor.shape);
  if (covered == all) return "";
  return "its parts have " + std::to_string(covered) + " of " + std::to_string(all) + " elements";
}

Findings check_dcp(const fs::path& folder, FileSystem& files) {
  Findings findings;
  note(findings, [&] { findings.has_checksums = is_there(folder / kSidecar, files); });
  if (findings.has_checksums) note(findings, [&] { check_files(folder, files, findings); });
  DcpMetadata metadata;
  const std::size_t faults_before = findings.faults.size();
  const fs::path file = folder / kMetadataFile;
  note(findings, [&] { metadata = read_dcp_metadata(read_whole(file, kMostMetadata, files), file.string()); });
  if (findings.faults.size() > faults_before) return findings;
  CheckedRecords records(folder, files, findings);
  for (const DcpItem& item : metadata.items) check_item(item, records, findings);
  return findings;
}

}  // namespace fsdp::ckpt
