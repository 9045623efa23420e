// How long it takes to open a checkpoint of thousands of ranks, and what one of them reads to load its part. Simulated: the metadata and
// the sidecar are those of all ranks, with files of 25 GB each, of which only one rank's records are there.
//
//   bench_checkpoint_metadata [ranks = 4096] [units = 25]

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/checked_files.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/records.h"

namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::ckpt;

constexpr std::int64_t kFileSize = std::int64_t{25000} << 20;  // what each rank's file is said to have
constexpr std::int64_t kRows = 8;                              // of a unit's matrix, on each rank
constexpr std::int64_t kColumns = 1024;

std::string file_of(std::int64_t rank) { return "__" + std::to_string(rank) + "_0.distcp"; }

/// Counts what is read, by file.
class CountingFiles : public ckpt::FileSystem {
 public:
  std::map<std::string, std::int64_t> bytes;

  int open(const char* path, int flags, mode_t mode) override {
    const int file = FileSystem::open(path, flags, mode);
    names_[file] = fs::path(path).filename();
    return file;
  }
  ssize_t pread(int file, void* data, std::size_t length, off_t offset) override {
    const ssize_t count = FileSystem::pread(file, data, length, offset);
    if (count > 0) bytes[names_[file]] += count;
    return count;
  }

 private:
  std::map<int, std::string> names_;
};

/// Wall-clock and processor seconds since it was made.
class Watch {
 public:
  std::string text() const {
    char text[80];
    std::snprintf(text, sizeof(text), "%.2f s (%.2f s of processor time)", wall() - wall_, processor() - processor_);
    return text;
  }

 private:
  static double wall() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  static double processor() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec); };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
  }
  double wall_ = wall();
  double processor_ = processor();
};

/// Each unit is a matrix of which every rank has some rows, and AdamW's moments of it.
ckpt::DcpMetadata metadata_of(std::int64_t ranks, std::int64_t units) {
  ckpt::DcpMetadata metadata;
  const ckpt::Shape shape = {ranks * kRows, kColumns};
  std::int64_t offset = 0;
  for (std::int64_t unit = 0; unit < units; ++unit) {
    const std::string parameter = "blocks." + std::to_string(unit) + ".weight";
    for (const std::string& name :
         {"model." + parameter, "optim.state." + parameter + ".exp_avg", "optim.state." + parameter + ".exp_avg_sq"}) {
      ckpt::DcpTensor tensor{.dtype = ckpt::Dtype::float32, .shape = shape, .chunks = {}};
      const std::int64_t length = ckpt::TensorRecord(tensor.dtype, {kRows, kColumns}).length();
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        tensor.chunks.push_back({{{rank * kRows, 0}, {kRows, kColumns}}, {file_of(rank), offset, length}});
      }
      offset += length;
      metadata.items.push_back({name, std::move(tensor)});
      metadata.paths.emplace_back(name, ckpt::DcpPath{name});
    }
  }
  return metadata;
}

/// One rank's file, as it would be; all others with made-up checksums.
std::vector<ckpt::ListedFile> write_files(const fs::path& folder, const ckpt::DcpMetadata& metadata, std::int64_t ranks,
                                          std::int64_t rank) {
  std::vector<ckpt::ListedFile> listed;
  const std::vector<std::uint32_t> sums(static_cast<std::size_t>(ckpt::blocks_of(kFileSize)), 7);
  for (std::int64_t other = 0; other < ranks; ++other) {
    if (other != rank) listed.push_back({file_of(other), kFileSize, sums});
  }
  ckpt::SummedFile own(folder, file_of(rank));
  const std::string data(static_cast<std::size_t>(kRows * kColumns) * sizeof(float), 'x');
  for (std::size_t i = 0; i < metadata.items.size(); ++i) {
    const ckpt::TensorRecord record(ckpt::Dtype::float32, {kRows, kColumns});
    own.append(record.head());
    own.append(record.tail(own.append(data)));
  }
  listed.push_back(own.finish());
  ckpt::SummedFile file(folder, std::string(ckpt::kMetadataFile));
  file.append(ckpt::write_dcp_metadata(metadata));
  listed.push_back(file.finish());
  return listed;
}

/// Reads and checks a rank's rows of every tensor. Returns their bytes.
std::int64_t read_part(const ckpt::DcpMetadata& metadata, ckpt::CheckedFiles& files, std::int64_t rank) {
  std::int64_t bytes = 0;
  std::vector<char> data(static_cast<std::size_t>(kRows * kColumns) * sizeof(float));
  for (const ckpt::DcpItem& item : metadata.items) {
    const auto& tensor = std::get<ckpt::DcpTensor>(item.content);
    for (const ckpt::Box& box : ckpt::boxes_of_slice(tensor.shape, rank * kRows * kColumns, kRows * kColumns)) {
      for (const ckpt::DcpTensor::Chunk& chunk : tensor.chunks) {
        if (!ckpt::intersection(chunk.box, box)) continue;
        const ckpt::ReadAt read = files[chunk.record.file].reader();
        read(ckpt::locate_tensor(read, chunk.record, item.name, tensor.dtype, chunk.box.sizes).offset, data);
        bytes += static_cast<std::int64_t>(data.size());
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t ranks = argc > 1 ? std::atoll(argv[1]) : 4096;
  const std::int64_t units = argc > 2 ? std::atoll(argv[2]) : 25;
  const std::int64_t rank = ranks / 2;
  const fs::path folder = fs::temp_directory_path() / ("fsdp-bench-metadata-" + std::to_string(getpid()));
  fs::create_directories(folder);
  {
    const Watch watch;
    const auto metadata = metadata_of(ranks, units);
    ckpt::seal_step(folder, write_files(folder, metadata, ranks, rank));
    std::printf("%lld ranks, %lld records, %.0f TB; metadata %.1f MB, sidecar %.1f MB; written in %s\n", static_cast<long long>(ranks),
                static_cast<long long>(ranks * units * 3), static_cast<double>(ranks * kFileSize) / 1e12,
                static_cast<double>(fs::file_size(folder / ckpt::kMetadataFile)) / 1e6,
                static_cast<double>(fs::file_size(folder / ckpt::kSidecar)) / 1e6, watch.text().c_str());
  }
  CountingFiles files;
  const Watch opening;
  ckpt::CheckedFiles checked(folder, files);
  const std::string name(ckpt::kMetadataFile);
  const auto metadata = ckpt::read_dcp_metadata(checked.read_whole(name, ckpt::kMostMetadata), name);
  std::printf("opened in %s\n", opening.text().c_str());
  files.bytes.erase(name);
  const Watch loading;
  const std::int64_t bytes = read_part(metadata, checked, rank);
  std::printf("rank %lld's part, %lld bytes of data, in %s; beside the metadata it has read\n", static_cast<long long>(rank),
              static_cast<long long>(bytes), loading.text().c_str());
  for (const auto& [file, count] : files.bytes) std::printf("  %lld bytes of %s\n", static_cast<long long>(count), file.c_str());
  fs::remove_all(folder);
  return 0;
}
