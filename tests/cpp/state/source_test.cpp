// What is read is what was written, whoever wrote it, and was checked: on the reading that looks, and on the reading that assigns.

#include "state/source.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/check.h"
#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "checkpoint/dcp_file.h"
#include "checkpoint/records.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/checkpoint_test.h"
#include "support/counting_files.h"
#include "support/edited_checkpoint.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/training.h"
#include "test_paths.h"

namespace source_test {

namespace ckpt = fsdp::ckpt;
namespace fs = std::filesystem;

using fsdp::state::open_source;
using fsdp::testing::adamw;
using fsdp::testing::CountingFiles;
using fsdp::testing::edit_metadata;
using fsdp::testing::expect_same_bits;
using fsdp::testing::FaultyFiles;
using fsdp::testing::flip_bit;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::on_rank_0;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Training;

class SourceTest : public fsdp::testing::CheckpointTest {};

/// What the installed torch writes, and what is kept of other versions.
std::vector<fs::path> torch_corpora(const fs::path& fresh) {
  fsdp::testing::run_peer(fsdp::testing::kCorpusPeer, {fresh.string()});
  std::vector<fs::path> corpora = {fresh};
  for (const auto& kept : fs::directory_iterator(fsdp::testing::kCorpus)) {
    if (fs::exists(kept.path() / "expected")) corpora.push_back(kept.path());
  }
  return corpora;
}

TEST_F(SourceTest, ReadsTheValuesThatTorchWrites) {
  for (const auto& corpus : torch_corpora(folder.path() / "fresh")) {
    const auto expected = open_source(corpus / "expected");
    ASSERT_GT(expected->names().size(), 15U);
    for (const auto* name : {"written", "written_without_crc"}) {
      const auto found = open_source(corpus / name);
      for (const auto& tensor : expected->names()) {
        SCOPED_TRACE((corpus / name / tensor).string());
        const auto whole = expected->read_whole(tensor);
        EXPECT_TRUE(same_bits(found->read_whole(tensor), whole));
        // A part alone.
        const auto shape = expected->find(tensor)->shape;
        if (whole.numel() < 4) continue;
        EXPECT_TRUE(
            same_bits(found->read(tensor, ckpt::whole(shape), 1, whole.numel() - 2), whole.flatten().narrow(0, 1, whole.numel() - 2)));
      }
    }
  }
}

TEST_F(SourceTest, ADtypeThatIsNotKnownSpoilsItsOwnTensorOnly) {
  for (const auto& corpus : torch_corpora(folder.path() / "fresh")) {
    const auto source = open_source(corpus / "written");
    EXPECT_TRUE(source->has("model.unknown_dtype"));
    EXPECT_FALSE(source->find("model.unknown_dtype").has_value());
    const auto message = message_of([&] { source->read_object("model.unknown_dtype"); });
    EXPECT_TRUE(has(message, "'model.unknown_dtype' cannot be read: its dtype is torch.complex32, which this library does not know"))
        << message;
  }
}

TEST_F(SourceTest, VerifyPassesWhatTorchWrites) {
  for (const auto& corpus : torch_corpora(folder.path() / "fresh")) {
    for (const auto* name : {"written", "expected", "written_without_crc"}) {
      const auto findings = ckpt::check_dcp(corpus / name);
      EXPECT_EQ(findings.faults, std::vector<std::string>()) << corpus / name;
      EXPECT_EQ(findings.only_for_python.size(), std::string(name) == "written" ? 20U : 0U);
    }
  }
}

// A bit that changed in any record is found, but for what is in none: gaps, and what torch wrote without checksums.
TEST_F(SourceTest, VerifyFindsABitThatChangedInWhatTorchWrote) {
  torch_corpora(folder.path() / "fresh");
  const auto step = folder.path() / "fresh" / "expected";
  const auto metadata = ckpt::read_dcp_metadata(fsdp::testing::read_file(step / ".metadata"), "metadata");
  int tensors = 0;
  for (const auto& item : metadata.items) {
    for (const auto& chunk : std::get<ckpt::DcpTensor>(item.content).chunks) {
      const auto file = step / chunk.record.file;
      const auto data = ckpt::locate_tensor(ckpt::File::open(file).reader(), chunk.record, item.name);
      if (data.length == 0) continue;
      ++tensors;
      for (const auto offset : {data.offset, data.offset + data.length - 1}) {
        flip_bit(file, offset, 3);
        const auto faults = ckpt::check_dcp(step).faults;
        ASSERT_EQ(faults.size(), 1U) << item.name;
        EXPECT_TRUE(has(faults[0], "the record of '" + item.name + "' in __0_0.distcp has another checksum")) << faults[0];
        flip_bit(file, offset, 3);
      }
    }
  }
  EXPECT_GT(tensors, 15);
}

/// A checkpoint of one tensor of 4 rows and 2 columns, whose two records have the boxes.
void write_boxes(const fs::path& folder, const ckpt::Box& first, const ckpt::Box& second) {
  fs::create_directories(folder);
  ckpt::SummedFile file(folder, "__0_0.distcp");
  ckpt::DcpTensor tensor{.dtype = ckpt::Dtype::float32, .shape = {4, 2}, .chunks = {}};
  for (const auto& box : {first, second}) {
    const ckpt::TensorRecord record(ckpt::Dtype::float32, box.sizes);
    tensor.chunks.push_back({box, {"__0_0.distcp", file.size(), record.length()}});
    file.append(record.head());
    const std::string data(static_cast<std::size_t>(record.data_length()), '\x01');
    file.append(record.tail(file.append(data)));
  }
  file.finish();
  ckpt::write_whole(folder / ckpt::kMetadataFile, ckpt::write_dcp_metadata({.items = {{"model.w", tensor}}, .paths = {}}));
}

TEST_F(SourceTest, OverlapsAndHolesDoNotMakeUpForEachOther) {
  write_boxes(path("good"), {{0, 0}, {2, 2}}, {{2, 0}, {2, 2}});
  EXPECT_EQ(open_source(path("good"))->read_whole("model.w").numel(), 8);
  write_boxes(path("rows"), {{0, 0}, {2, 2}}, {{1, 0}, {2, 2}});
  write_boxes(path("columns"), {{0, 0}, {4, 1}}, {{2, 0}, {2, 2}});
  for (const auto* name : {"rows", "columns"}) {
    const auto message = message_of([&] { open_source(path(name))->read_whole("model.w"); });
    EXPECT_TRUE(has(message, "the stored parts of 'model.w' overlap; the checkpoint is damaged")) << message;
  }
  write_boxes(path("hole"), {{0, 0}, {2, 2}}, {{3, 0}, {1, 2}});
  const auto message = message_of([&] { open_source(path("hole"))->read_whole("model.w"); });
  EXPECT_TRUE(has(message, "the stored parts of 'model.w' leave out elements that are needed")) << message;
  // Who does not need them does not mind.
  EXPECT_EQ(open_source(path("hole"))->read("model.w", ckpt::whole({4, 2}), 0, 4).numel(), 4);
}

/// As Python leaves it: without a sidecar, records with checksums of their own.
void become_python(const std::string& step) {
  edit_metadata(step, [](ckpt::DcpMetadata&) {});
}

/// A checkpoint of one matrix, in these boxes.
void write_matrix(const fs::path& folder, const at::Tensor& matrix, const std::vector<ckpt::Box>& boxes) {
  fs::create_directories(folder);
  ckpt::DcpFile file(folder, "__0_0.distcp");
  file.add_tensor("w", {"w"}, ckpt::Dtype::float32, matrix.sizes().vec());
  for (const auto& box : boxes) {
    const auto part = matrix.narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], box.sizes[1]).contiguous();
    file.add_box(box, [&](const ckpt::DcpFile::Append& append) {
      append({static_cast<const char*>(part.const_data_ptr()), part.nbytes()});
    });
  }
  auto metadata = file.take_metadata();
  ckpt::seal_dcp(folder, ckpt::write_dcp_metadata(metadata), {file.finish()});
}

// Two names may stand for one record (a tied head): each is compared with the whole record's checksum when it is assigned.
TEST_F(SourceTest, EveryPartOfARecordIsComparedWhenItIsAssigned) {
  const auto matrix = torch::rand({30, 11});
  write_matrix(path("step"), matrix, {{{0, 0}, {30, 11}}});
  become_python(path("step"));
  bool ended = false;
  for (std::int64_t good = 0; !ended; ++good) {
    FaultyFiles files;
    const ckpt::ReplacedFileSystem replaced(files);
    const auto source = open_source(path("step"));
    fsdp::state::Transfer transfer(*source);
    const auto first = torch::zeros({100});
    const auto second = torch::zeros({100});
    transfer.add("w", ckpt::whole({30, 11}), 3, first);
    transfer.add("w", ckpt::whole({30, 11}), 3, second);
    files.true_preads = good;
    if (message_of([&] { transfer.read_at_once(); }) != "no error") continue;
    ended = true;
    const auto expected = matrix.flatten().narrow(0, 3, 100);
    EXPECT_TRUE(same_bits(first, expected) && same_bits(second, expected)) << good;
  }
}

/// Columns of a matrix whose rows nobody has counted, which lie in no file.
class LongColumns final : public fsdp::state::Source {
 public:
  static constexpr std::int64_t kRows = std::int64_t{1} << 40;

  Format format() const override { return Format::kDcp; }
  const std::string& path() const override { return text_; }
  std::int64_t saved() const override { return 0; }
  const std::vector<std::string>& names() const override { return names_; }
  bool has(const std::string& name) const override { return name == text_; }
  std::optional<Tensor> find(const std::string&) const override { return Tensor{ckpt::Dtype::float32, {kRows, 4}}; }
  std::string unreadable(const std::string&) const override { return {}; }
  std::vector<StoredBox> boxes(const std::string&) const override {
    return {{{{0, 0}, {kRows, 3}}, {text_, 0, 12 * kRows}}, {{{0, 3}, {kRows, 1}}, {text_, 12 * kRows, 4 * kRows}}};
  }
  ckpt::TensorData locate(const std::string&, const StoredBox&) override { throw fsdp::Error("no file"); }
  ckpt::CheckedFile& file(const std::string&) override { throw fsdp::Error("no file"); }
  ckpt::PythonValue read_object(const std::string&) override { throw fsdp::Error("no file"); }

 private:
  const std::string text_ = "matrix";
  const std::vector<std::string> names_ = {text_};
};

// What is not needed of a stored box costs nothing. Its runs alone would take more memory than there is.
TEST(TransferTest, LooksAtWhatIsNeededOnly) {
  LongColumns source;
  fsdp::state::Transfer transfer(source);
  const auto to = torch::zeros({10});
  transfer.add("matrix", ckpt::whole({LongColumns::kRows, 4}), 2 * LongColumns::kRows + 1, to);
  transfer.add("matrix", {{5, 1}, {LongColumns::kRows - 5, 2}}, 7, to);
  EXPECT_EQ(transfer.bytes(), 80);
}

// Records begin and end within blocks: they are read once, too, for the record that ends there and the one that begins.
TEST_F(SourceTest, ReadsEachBlockOnceToCheckIt) {
  const auto values = torch::rand({7, 300001});  // 8 MiB, and a part of a block
  fs::create_directories(path("step"));
  ckpt::DcpFile file(path("step"), "__0_0.distcp");
  for (const auto* name : {"a", "b", "c"}) {
    file.add_tensor(name, {name}, ckpt::Dtype::float32, {7, 300001});
    file.add_box(ckpt::whole({7, 300001}), [&](const ckpt::DcpFile::Append& append) {
      append({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
    });
  }
  auto metadata = file.take_metadata();
  auto listed = file.finish();
  const auto size = listed.size;
  ckpt::seal_dcp(path("step"), ckpt::write_dcp_metadata(metadata), {std::move(listed)});

  CountingFiles files;
  const ckpt::ReplacedFileSystem replaced(files);
  const auto source = open_source(path("step"));
  fsdp::state::Transfer transfer(*source);
  std::vector<at::Tensor> loaded;
  for (const auto* name : {"a", "b", "c"}) {
    transfer.add(name, ckpt::whole({7, 300001}), 0, loaded.emplace_back(torch::zeros(values.numel())));
  }
  files.bytes = 0;
  transfer.check();
  EXPECT_GE(files.bytes, size);
  EXPECT_LT(files.bytes, size + ckpt::kSummedBlock / 4);  // what says where a record's values are is read again
  files.bytes = 0;
  transfer.read();
  EXPECT_EQ(files.bytes, 3 * static_cast<std::int64_t>(values.nbytes()));
  for (const auto& tensor : loaded) EXPECT_TRUE(same_bits(tensor, values.flatten()));
}

// Of whatever boxes, into whatever dtype, in one reading. Columns that are converted are the exception: copies of some values each would
// take longer than another reading.
TEST_F(SourceTest, AllAtOnceIsOneReading) {
  constexpr std::int64_t kRows = 3000;
  constexpr std::int64_t kColumns = 1003;  // 12 MB, rows that end within blocks
  const auto matrix = torch::rand({kRows, kColumns});
  write_matrix(path("rows"), matrix, {{{0, 0}, {1001, kColumns}}, {{1001, 0}, {kRows - 1001, kColumns}}});
  write_matrix(path("columns"), matrix, {{{0, 0}, {kRows, 500}}, {{0, 500}, {kRows, kColumns - 500}}});
  const auto own = ckpt::Box{{0, 100}, {kRows, 700}};  // as a tensor-parallel rank's
  for (const auto* name : {"rows", "columns"}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const bool is_whole : {true, false}) {
        SCOPED_TRACE(std::string(name) + (dtype == at::kFloat ? "" : ", converted") + (is_whole ? "" : ", a piece"));
        const auto box = is_whole ? ckpt::whole(matrix.sizes().vec()) : own;
        const auto expected = is_whole ? matrix : matrix.narrow(1, 100, 700);
        CountingFiles files;
        const ckpt::ReplacedFileSystem replaced(files);
        const auto source = open_source(path(name));
        fsdp::state::Transfer transfer(*source);
        // Not from the beginning.
        const auto to = torch::zeros({expected.numel() - 10}, dtype);
        transfer.add("w", box, 10, to);
        const auto version = to._version();
        files.bytes = 0;
        transfer.read_at_once();
        EXPECT_TRUE(same_bits(to, expected.flatten().narrow(0, 10, to.numel()).to(dtype)));
        EXPECT_GT(to._version(), version);
        // What is not needed lies in blocks that are.
        const auto size = static_cast<double>(matrix.nbytes());
        const bool twice = std::string(name) == "columns" && dtype == at::kDouble;
        EXPECT_GT(static_cast<double>(files.bytes), size * (twice ? 1.6 : 0.95));
        EXPECT_LT(static_cast<double>(files.bytes), size * (twice ? 2.25 : 1.25));
      }
    }
  }
}

// The bytes that are kept are the ones that were compared, also where they had been compared before.
TEST_F(SourceTest, AllAtOnceFindsEveryBitThatChanged) {
  const auto matrix = torch::rand({3000, 1003});
  for (const bool is_python : {false, true}) {
    write_matrix(path("step"), matrix, {{{0, 0}, {1001, 1003}}, {{1001, 0}, {1999, 1003}}});
    if (is_python) become_python(path("step"));
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto source = open_source(path("step"));
      const auto data = source->locate("w", source->boxes("w")[1]);
      fsdp::state::Transfer before(*source);
      before.add("w", ckpt::whole({3000, 1003}), 0, torch::zeros({3000 * 1003}, dtype));
      before.check();
      for (const auto byte : {data.offset, data.offset + data.length / 2, data.offset + data.length - 1}) {
        flip_bit(fs::path(path("step")) / "__0_0.distcp", byte, 3);
        // As a load does it, and from a source that has compared these bytes already: of blocks in part it may still have them.
        const auto again = open_source(path("step"));
        for (auto* from : {again.get(), source.get()}) {
          if (is_python && from == source.get()) continue;
          fsdp::state::Transfer transfer(*from);
          const auto to = torch::zeros({3000 * 1003}, dtype);
          transfer.add("w", ckpt::whole({3000, 1003}), 0, to);
          const auto message = message_of([&] { transfer.read_at_once(); });
          const bool has_them = from == source.get() && message == "no error" && same_bits(to, matrix.flatten().to(dtype));
          EXPECT_TRUE(has_them ? byte != data.offset + data.length / 2 : has(message, "damaged")) << message << " " << byte;
        }
        flip_bit(fs::path(path("step")) / "__0_0.distcp", byte, 3);
      }
    }
    fs::remove_all(path("step"));
  }
}

// Saved on two ranks, read on three: most records are needed in part.
TEST_F(SourceTest, ABitThatChangedInWhatPythonWroteIsFoundBeforeAnythingIsAssigned) {
  run_ranks(2, [&] {
    const Training run = trained_and_saved(path("1"));
    on_rank_0(run.mesh, [&] { become_python(path("1")); });
  });
  const auto metadata = ckpt::read_dcp_metadata(fsdp::testing::read_file(path("1") + "/.metadata"), "metadata");
  struct Place {
    std::string name;
    std::string file;
    std::int64_t offset;
  };
  std::vector<Place> places;
  for (const auto& item : metadata.items) {
    const auto* tensor = std::get_if<ckpt::DcpTensor>(&item.content);
    if (tensor == nullptr || item.name.starts_with("fsdp.")) continue;
    for (const auto& chunk : tensor->chunks) {
      const auto data = ckpt::locate_tensor(ckpt::File::open(fs::path(path("1")) / chunk.record.file).reader(), chunk.record, item.name);
      places.push_back({item.name, chunk.record.file, data.offset + data.length / 2});
    }
  }
  ASSERT_GT(places.size(), 60U);
  run_ranks(3, [&] {
    // Damages one place after the other.
    const auto expect_found = [&](Training& loader, const std::string& beginning) {
      for (std::size_t i = 0; i < places.size(); i += 5) {
        const auto& [name, file, offset] = places[i];
        const auto flip = [&, file = file, offset = offset] {
          on_rank_0(loader.mesh, [&] { flip_bit(fs::path(path("1")) / file, offset, 2); });
        };
        flip();
        const auto message = message_of([&] { fsdp::load(path("1"), *loader.model, *loader.optimizer); });
        // One rank reads counts for all, before.
        EXPECT_TRUE(message.starts_with(name.ends_with(".step") ? "nothing was loaded:" : beginning)) << message;
        EXPECT_TRUE(has(message, "is damaged") && has(message, "'" + name + "'")) << name << ": " << message;
        flip();
      }
    };
    Training run = trained_otherwise();
    const auto before = run.handle->full_parameters();
    expect_found(run, "nothing was loaded:");
    expect_same_bits(run.handle->full_parameters(), before);
    // In one reading, too.
    Training fresh({}, adamw(), 13);
    expect_found(fresh, "the load ended halfway");
    fsdp::load(path("1"), *run.model, *run.optimizer);
    fsdp::load(path("1"), *fresh.model, *fresh.optimizer);
    expect_same_bits(fresh.handle->full_parameters(), run.handle->full_parameters());
  });
}

// A disk, or memory of the system's, that gives other bytes the second time.
TEST_F(SourceTest, BytesThatChangeBeforeTheyAreAssignedAreFound) {
  for (const bool is_python : {false, true}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      SCOPED_TRACE(std::string(is_python ? "Python's" : "ours") + (dtype == at::kFloat ? "" : ", converted"));
      const auto step = path(std::string(is_python ? "python" : "ours") + (dtype == at::kFloat ? "" : "_converted"));
      run_ranks(2, [&](int rank) {
        Training run;
        run.train(0, 1);
        fsdp::save(step, *run.model, *run.optimizer);
        if (is_python && rank == 0) become_python(step);
        run.mesh.barrier();
        std::optional<Training> other;
        int before = 0;
        int while_assigning = 0;
        bool ended = false;
        for (std::int64_t good = 0; !ended; good += good / 16 + 1) {
          SCOPED_TRACE(good);
          other.emplace(fsdp::FullyShardOptions{.mixed_precision = fsdp::MixedPrecisionPolicy{.main_params_dtype = dtype}}, adamw(), 12);
          other->train(0, 1);
          FaultyFiles files;
          if (rank == 1) files.true_preads = good;
          std::string message;
          {
            const ckpt::ReplacedFileSystem replaced(files);
            message = message_of([&] { fsdp::load(step, *other->model, *other->optimizer, {.rng = false}); });
          }
          ended = message == "no error";
          if (message.starts_with("nothing was loaded:")) {
            ++before;
          } else if (!ended) {
            ++while_assigning;
            EXPECT_TRUE(message.starts_with("the checkpoint was intact, but then could no longer be read")) << message;
            EXPECT_TRUE(has(message, "changed while they were loaded")) << message;
          }
        }
        EXPECT_GT(before, 0);
        EXPECT_GT(while_assigning, 0);
        // What came without an error is right, the optimizer's state too.
        fsdp::save(step + "_again", *other->model, *other->optimizer);
        other->mesh.barrier();
        auto expected = fsdp::testing::stored_tensors(step);
        auto loaded = fsdp::testing::stored_tensors(step + "_again");
        std::erase_if(expected, [](const auto& entry) { return entry.first.starts_with("fsdp."); });
        for (const auto& [name, value] : expected) EXPECT_TRUE(same_bits(loaded.at(name).to(value.scalar_type()), value)) << name;
      });
    }
  }
}

}  // namespace source_test
