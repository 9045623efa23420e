#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_parts.h"
#include "fsdp/error.h"
#include "support/messages.h"
#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace safetensors_test {

namespace fs = std::filesystem;
using fsdp::testing::message_of;
using fsdp::testing::run_python;
using fsdp::testing::TemporaryFolder;

std::string read_data(const fs::path& path, const SafetensorsTensor& tensor) {
  std::string data(static_cast<std::size_t>(tensor.length), '\0');
  File::open(path).read_at(tensor.offset, data);
  return data;
}

/// Writes a planned file's data in reverse order, as ranks might.
void write_planned(const fs::path& folder, const PlannedSafetensors& planned, const std::map<std::string, std::string>& data) {
  File file = File::create(folder / planned.file.name);
  for (auto tensor = planned.file.tensors.rbegin(); tensor != planned.file.tensors.rend(); ++tensor) {
    EXPECT_EQ(tensor->offset % itemsize(tensor->dtype), 0);
    file.write_at(tensor->offset, data.at(tensor->name));
  }
  file.write_at(0, planned.head);
  EXPECT_EQ(file.size(), planned.size);
}

TEST(Safetensors, BothWaysWithPython) {
  const TemporaryFolder folder;
  run_python("write_safetensors", folder.path());
  const fs::path path = folder.path() / "python.safetensors";
  const File file = File::open(path);
  const SafetensorsHeader header = read_safetensors_header(file.reader(), file.size(), path.string());
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"by", "x"}, {"format", "pt"}}));
  std::map<std::string, std::string> data;
  for (const SafetensorsTensor& tensor : header.tensors) data[tensor.name] = read_data(path, tensor);
  for (const DtypeNames& names : dtypes()) {
    if (names.safetensors.empty()) continue;
    std::string expected;
    for (std::int64_t k = 0; k < 6 * names.itemsize; ++k) expected += static_cast<char>(k % (names.dtype == Dtype::boolean ? 2 : 251));
    EXPECT_EQ(data.at(std::string(names.name)), expected);
    const auto tensor = std::find_if(header.tensors.begin(), header.tensors.end(), [&](const auto& it) { return it.name == names.name; });
    EXPECT_EQ(tensor->dtype, names.dtype);
    EXPECT_EQ(tensor->shape, (Shape{2, 3}));
  }

  const SafetensorsPlan one = plan_safetensors(header.tensors);
  ASSERT_EQ(one.files.size(), 1U);
  EXPECT_EQ(one.index, "");
  write_planned(folder.path(), one.files[0], data);
  const SafetensorsPlan three = plan_safetensors(header.tensors, {.most_bytes_per_file = 170});
  ASSERT_EQ(three.files.size(), 3U);
  fs::create_directory(folder.path() / "sharded");
  for (const PlannedSafetensors& planned : three.files) write_planned(folder.path() / "sharded", planned, data);
  folder.write("sharded/model.safetensors.index.json", three.index);
  run_python("check_safetensors", folder.path());

  for (const fs::path& model : {folder.path(), folder.path() / "model.safetensors", folder.path() / "sharded"}) {
    std::map<std::string, std::string> again;
    const fs::path where = fs::is_directory(model) ? model : folder.path();
    for (const SafetensorsFile& part : read_safetensors(model)) {
      for (const SafetensorsTensor& tensor : part.tensors) again[tensor.name] = read_data(where / part.name, tensor);
    }
    EXPECT_EQ(again, data);
  }
}

SafetensorsHeader read(const std::string& text) {
  const ReadAt reader = [&text](std::int64_t offset, std::span<char> to) {
    ASSERT_LE(static_cast<std::size_t>(offset) + to.size(), text.size());
    std::memcpy(to.data(), text.data() + offset, to.size());
  };
  return read_safetensors_header(reader, static_cast<std::int64_t>(text.size()), "F");
}

std::string file_of(const std::string& json, std::size_t data) {
  std::uint64_t length = json.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + json + std::string(data, 'd');
}

std::string error_of(const std::string& json, std::size_t data = 8) {
  return message_of([&] { read(file_of(json, data)); });
}

TEST(Safetensors, TensorsOfAnyOrderAndWithoutElements) {
  const SafetensorsHeader header =
      read(file_of(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},)"
                   R"("e":{"dtype":"F64","shape":[0,9],"data_offsets":[4,4]},"s":{"dtype":"I32","shape":[],"data_offsets":[8,12]}}  )",
                   12));
  ASSERT_EQ(header.tensors.size(), 4U);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].name, "e");
  EXPECT_EQ(header.tensors[2].name, "b");
  EXPECT_EQ(header.tensors[3].shape, Shape{});
  EXPECT_EQ(read(file_of("{}", 0)).tensors.size(), 0U);
}

TEST(Safetensors, DamageIsAnErrorWithNames) {
  EXPECT_EQ(message_of([] { read("short"); }), "F: not a safetensors file: it has 5 bytes");
  EXPECT_EQ(message_of([] { read(std::string(20, '\xFF')); }),
            "F: not a safetensors file, or cut off: its header would have 18446744073709551615 of the file's 20 bytes");
  EXPECT_EQ(error_of(" {}"), "F: not a safetensors file: its header does not begin with '{'");
  EXPECT_NE(error_of("{\"a\":").find("F: not valid JSON"), std::string::npos);
  EXPECT_NE(error_of("{\"\xFF\":1}").find("F: not valid JSON"), std::string::npos);
  EXPECT_EQ(error_of(R"({"a":{"b":[[1]]}})"), "F: the JSON is nested deeper than this format is");
  EXPECT_EQ(error_of("{}"), "F: the file has 18 bytes, but its tensors end at 10");
  EXPECT_EQ(error_of(R"({"a":1})"), "F: tensor 'a' has no 'dtype'");
  EXPECT_EQ(error_of(R"({"__metadata__":{"a":1}})"), "F: __metadata__ 'a' is no string");
  EXPECT_EQ(error_of(R"({"__metadata__":{"a":["b"]}})"), "F: __metadata__ 'a' is no string");
  EXPECT_EQ(error_of(R"({"__metadata__":7})"), "F: __metadata__ is no object");
  EXPECT_LT(error_of("{\"" + std::string(1000, 'a') + "\":1}").size(), 300U);
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const auto error_with = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return error_of("{\"a\":" + tensor(dtype, shape, offsets) + "}");
  };
  EXPECT_EQ(error_with("7", "[1]", "[0,8]"), "F: tensor 'a' has no name as its dtype, but 7");
  EXPECT_EQ(error_with("[]", "[1]", "[0,8]"), "F: tensor 'a' has no name as its dtype, but a list");
  EXPECT_EQ(error_with("\"F4\"", "[5,3]", "[0,8]"), "F: tensor 'a' has no whole number of bytes");
  EXPECT_EQ(error_with("\"F4\"", "[4,3]", "[0,8]"), "F: tensor 'a' has 8 bytes, but its dtype and shape ask for 6");
  EXPECT_EQ(error_with("\"F32\"", "[1]", "[0,8]"), "F: tensor 'a' has 8 bytes, but its dtype and shape ask for 4");
  EXPECT_EQ(error_with("\"F32\"", "[-1]", "[0,8]"), "F: tensor 'a': a size is no natural number: -1");
  EXPECT_EQ(error_with("\"F32\"", "[2.0]", "[0,8]"), "F: tensor 'a': a size is no natural number: 2.0");
  EXPECT_EQ(error_with("\"F32\"", "[2]", "[0,9]"), "F: tensor 'a' has bytes [0, 9) of 8");
  EXPECT_EQ(error_with("\"F32\"", "[2]", "[8,0]"), "F: tensor 'a' has bytes [8, 0) of 8");
  EXPECT_EQ(error_with("\"F32\"", "[2]", "[0]"), "F: tensor 'a' needs two data_offsets");
  EXPECT_EQ(error_with("\"F32\"", "[2]", "[0,4,8]"), "F: tensor 'a' needs two data_offsets");
  EXPECT_EQ(error_with("\"F32\"", "[2]", "{}"), "F: tensor 'a' needs two data_offsets");
  EXPECT_EQ(error_with("\"F32\"", "2", "[0,8]"), "F: tensor 'a' has no list as its shape");
  EXPECT_EQ(error_of(R"({"a":{"dtype":"U8","data_offsets":[0,8]}})"), "F: tensor 'a' has no 'shape'");
  EXPECT_EQ(error_of(R"({"a":{"dtype":"U8","shape":[8]}})"), "F: tensor 'a' has no 'data_offsets'");
  EXPECT_EQ(error_of(R"({"a":[]})"), "F: tensor 'a' has no 'dtype'");
  EXPECT_EQ(error_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"shape":[8]}})"), "F: the key 'shape' is there twice");
  EXPECT_EQ(error_with("\"F32\"", "[4294967296,4294967296]", "[0,8]"),
            "F: a tensor of shape [4294967296, 4294967296] has more than 2^63 - 1 elements");
  EXPECT_EQ(error_with("\"F32\"", "[4611686018427387904]", "[0,8]"), "F: tensor 'a' has more than 2^63 - 1 bytes");
  const std::string half = tensor("\"F32\"", "[1]", "[0,4]");
  EXPECT_NE(error_of("{\"a\":" + half + ",\"b\":" + half + "}").find("begin at byte"), std::string::npos);
  EXPECT_EQ(error_of("{\"a\":" + half + ",\"a\":" + half + "}"), "F: the key 'a' is there twice");
  EXPECT_NE(error_of("{\"a\":" + tensor("\"F32\"", "[1]", "[4,8]") + "}").find("but should at"), std::string::npos);
}

// As safetensors 0.8 has them: F4 counts numbers, of which a byte has two; torch has no dtype for F6_E2M3, nor for what comes next.
TEST(Safetensors, ATensorOfAnUnknownDtypeIsTheOnlyOneThatCannotBeRead) {
  const SafetensorsHeader header = read(
      file_of(R"({"__metadata__":null,"next":{"dtype":"F3","shape":[3,7],"data_offsets":[0,5],"more":[7]},)"
              R"("six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[5,8]},"scale":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[8,10]},)"
              R"("four":{"dtype":"F4","shape":[2,8],"data_offsets":[10,18]},"odd":{"dtype":"F4","shape":[2,3],"data_offsets":[18,21]}})",
              21));
  ASSERT_EQ(header.tensors.size(), 5U);
  EXPECT_EQ(header.tensors[0].unreadable, "its dtype F3 is not supported");
  EXPECT_EQ(header.tensors[0].shape, (Shape{3, 7}));
  EXPECT_EQ(header.tensors[0].length, 5);
  EXPECT_EQ(header.tensors[1].unreadable, "its dtype F6_E2M3 is not supported");
  EXPECT_EQ(header.tensors[2].unreadable, "");
  EXPECT_EQ(header.tensors[2].dtype, Dtype::float8_e8m0fnu);
  EXPECT_EQ(header.tensors[3].unreadable, "");
  EXPECT_EQ(header.tensors[3].dtype, Dtype::float4_e2m1fn_x2);
  EXPECT_EQ(header.tensors[3].shape, (Shape{2, 4}));
  EXPECT_NE(header.tensors[4].unreadable.find("does not divide by two"), std::string::npos) << header.tensors[4].unreadable;
}

// A reader whose time grows with the square of a count does not come to an end here.
TEST(Safetensors, ManyOfAnything) {
  constexpr int kCount = 100'000;
  std::string tensors;
  std::string weights;
  std::string metadata;
  std::string fields;
  std::string sizes = "1";
  for (int i = 0; i < kCount; ++i) {
    const std::string key = "\"" + std::to_string(i) + "\":";
    tensors += "," + key + R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    weights += (i == 0 ? "" : ",") + key + R"("file")";
    metadata += (i == 0 ? "" : ",") + key + R"("")";
    fields += "," + key + "[]";
    sizes += ",1";
  }
  const SafetensorsHeader header = read(file_of("{\"__metadata__\":{" + metadata + "}" + tensors + "}", 0));
  EXPECT_EQ(header.tensors.size(), std::size_t{kCount});
  EXPECT_EQ(header.metadata.size(), std::size_t{kCount});
  const std::string strange = R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[)" + sizes + "]" + fields + "}}";
  EXPECT_EQ(read(file_of(strange, 1)).tensors.at(0).shape.size(), std::size_t{kCount} + 1);
  EXPECT_EQ(read_safetensors_index(R"({"weight_map":{)" + weights + "}}", "F").at("file").size(), std::size_t{kCount});
}

TEST(Safetensors, AnIndexMustFitItsFiles) {
  const TemporaryFolder folder;
  const SafetensorsPlan plan = plan_safetensors({{.name = "a", .shape = {2}}, {.name = "b", .shape = {1}}}, {.most_bytes_per_file = 8});
  ASSERT_EQ(plan.files.size(), 2U);
  for (const PlannedSafetensors& planned : plan.files) {
    write_planned(folder.path(), planned, {{"a", std::string(8, 'a')}, {"b", std::string(4, 'b')}});
  }
  folder.write("model.safetensors.index.json", plan.index);
  EXPECT_EQ(read_safetensors(folder.path()).size(), 2U);

  const auto error_with = [&](const std::string& index) {
    folder.write("model.safetensors.index.json", index);
    return message_of([&] { read_safetensors(folder.path()); });
  };
  const std::string message = error_with(R"({"weight_map":{"c":"model-00001-of-00002.safetensors"}})");
  EXPECT_NE(message.find("the index names what the files have not:\n  'c' is not in model-00001-of-00002.safetensors"), std::string::npos)
      << message;
  EXPECT_NE(error_with(R"({"weight_map":{"a":"../secret"}})").find("'a' is in \"../secret\", which is no file of this folder"),
            std::string::npos);
  for (const char* none : {"[]", "7", "{}", R"({"metadata":{"weight_map":{}}})"}) {
    EXPECT_NE(error_with(none).find("the index has no 'weight_map'"), std::string::npos) << none;
  }
  EXPECT_NE(error_with(R"({"weight_map":[]})").find("weight_map is no object"), std::string::npos);
  EXPECT_NE(error_with(R"({"weight_map":{"a":["file"]}})").find("'a' is in a list, which is no file"), std::string::npos);
  EXPECT_NE(error_with(R"({"weight_map":{"a":"file","a":"file"}})").find("the key 'a' is there twice"), std::string::npos);
}

// A part of a model is asked for, and a part of it was downloaded.
TEST(Safetensors, FilesMayHoldMoreThanTheIndexNamesAndOthersBeGone) {
  const TemporaryFolder folder;
  const SafetensorsPlan plan = plan_safetensors({{.name = "a", .shape = {2}}, {.name = "b", .shape = {1}}});
  write_planned(folder.path(), plan.files[0], {{"a", std::string(8, 'a')}, {"b", std::string(4, 'b')}});
  fs::rename(folder.path() / "model.safetensors", folder.path() / "part");
  folder.write("model.safetensors.index.json", R"({"weight_map":{"b":"part","c":"gone","d":"gone"}})");
  const auto files = read_safetensors(folder.path());
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].not_there, (std::vector<std::string>{"c", "d"}));
  ASSERT_EQ(files[1].tensors.size(), 1U);
  EXPECT_EQ(files[1].tensors[0].name, "b");
}

// A model of several files was here before, and neither its index nor its files went when the new one was written.
TEST(Safetensors, ALeftoverIndexIsNotTheModel) {
  const TemporaryFolder folder;
  const std::map<std::string, std::string> data = {{"a", std::string(8, 'a')}, {"b", std::string(4, 'b')}};
  const std::vector<SafetensorsTensor> tensors = {{.name = "a", .shape = {2}}, {.name = "b", .shape = {1}}};
  const SafetensorsPlan old = plan_safetensors(tensors, {.most_bytes_per_file = 8});
  for (const PlannedSafetensors& planned : old.files) write_planned(folder.path(), planned, data);
  folder.write("model.safetensors.index.json", old.index);
  EXPECT_EQ(read_safetensors(folder.path()).size(), 2U);
  write_planned(folder.path(), plan_safetensors(tensors).files[0], data);
  const auto files = read_safetensors(folder.path());
  ASSERT_EQ(files.size(), 1U);
  EXPECT_EQ(files[0].name, "model.safetensors");
  EXPECT_EQ(files[0].tensors.size(), 2U);
}

/// What a rank wrote: `rows` of "a", which has two columns.
std::string of_rank(int rows, const std::string& places) {
  return file_of(R"({"__metadata__":{"format":"pt","DCP_SHARDING_INFO":")" + places + R"("},"a":{"dtype":"U8","shape":[)" +
                     std::to_string(rows) + R"(,2],"data_offsets":[0,)" + std::to_string(2 * rows) + "]}}",
                 static_cast<std::size_t>(2 * rows));
}

// As torch.distributed.checkpoint's HuggingFaceStorageWriter leaves them with save_distributed=True.
TEST(Safetensors, PartsOfRanksAreOneTensor) {
  const TemporaryFolder folder;
  folder.write("shard-00002-model-00001-of-00001.safetensors", of_rank(2, R"({\"a\": {\"saved_offsets\": [3, 0]}})"));
  EXPECT_EQ(join_boxes(read_safetensors(folder.path())).at(0).tensor.shape, (Shape{5, 2}));
  folder.write("shard-00001-model-00001-of-00001.safetensors", of_rank(3, R"({\"a\": {\"saved_offsets\": [0, 0], \"more\": [7]}})"));
  EXPECT_TRUE(is_safetensors(folder.path()));
  const auto joined = join_boxes(read_safetensors(folder.path()));
  ASSERT_EQ(joined.size(), 1U);
  EXPECT_EQ(joined[0].name, "a");
  EXPECT_EQ(joined[0].tensor.shape, (Shape{5, 2}));
  ASSERT_EQ(joined[0].tensor.chunks.size(), 2U);
  EXPECT_EQ(joined[0].tensor.chunks[0].box, (Box{{0, 0}, {3, 2}}));
  EXPECT_EQ(joined[0].tensor.chunks[1].box, (Box{{3, 0}, {2, 2}}));
  EXPECT_EQ(joined[0].tensor.chunks[1].record.file, "shard-00002-model-00001-of-00001.safetensors");

  const auto error_with = [&](const std::string& places) {
    folder.write("shard-00002-model-00001-of-00001.safetensors", of_rank(2, places));
    return message_of([&] { join_boxes(read_safetensors(folder.path())); });
  };
  for (const char* places :
       {"{}", R"({\"a\": {}})", R"({\"a\": {\"saved_offsets\": [3]}})", R"({\"a\": {\"saved_offsets\": [9223372036854775807, 0]}})"}) {
    EXPECT_NE(error_with(places).find("tensor 'a' has no saved_offsets that fit its shape"), std::string::npos) << places;
  }
  EXPECT_NE(error_with("[]").find("DCP_SHARDING_INFO has another form"), std::string::npos);
  EXPECT_NE(error_with(R"({\"a\": {\"saved_offsets\": [-3, 0]}})").find("an offset is no natural number: -3"), std::string::npos);
  folder.write("shard-00002-model-00001-of-00001.safetensors", file_of(R"({"a":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}})", 4));
  EXPECT_NE(message_of([&] { join_boxes(read_safetensors(folder.path())); }).find("tensor 'a' is no part of the one of this name"),
            std::string::npos);
}

TEST(Safetensors, AFileOfTorchSaveIsRecognised) {
  const TemporaryFolder folder;
  for (const std::string begin : {"PK\x03\x04", "\x80\x02\x8a"}) {  // of today's torch, and of torch before 1.6
    folder.write("model.pt", begin + std::string(100, 'x'));
    const auto message = message_of([&] { read_safetensors(folder.path() / "model.pt"); });
    EXPECT_NE(message.find("model.pt: this is a file of torch.save, not a checkpoint. In Python, read it by torch.load"), std::string::npos)
        << message;
  }
}

TEST(Safetensors, WhatTheFormatLacksIsAnError) {
  EXPECT_NE(message_of([] { plan_safetensors({{.name = "a", .dtype = Dtype::complex128, .shape = {2}}}); }).find("do not know"),
            std::string::npos);
  EXPECT_EQ(message_of([] {
              plan_safetensors({{.name = "a", .shape = {2}}, {.name = "a", .shape = {2}}});
            }),
            "'a' cannot be the name of two tensors");
  EXPECT_EQ(message_of([] { plan_safetensors({{.name = "__metadata__", .shape = {2}}}); }),
            "'__metadata__' cannot be the name of a tensor");
  EXPECT_NE(message_of([] { plan_safetensors({{.name = "a", .dtype = Dtype::float4_e2m1fn_x2, .shape = {}}}); }).find("no last dimension"),
            std::string::npos);
  EXPECT_NE(message_of([] { plan_safetensors({{.name = "\xFF", .shape = {2}}}); }).find("the name '\\xff' is not UTF-8"),
            std::string::npos);
}

}  // namespace safetensors_test
}  // namespace fsdp::ckpt
