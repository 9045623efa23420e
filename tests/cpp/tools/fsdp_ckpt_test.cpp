// Runs the command itself, as a user does. What it reads, Python wrote, and what it writes, Python reads.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "fsdp/version.h"
#include "support/python_peer.h"
#include "support/temporary_folder.h"
#include "test_paths.h"

namespace fsdp {
namespace fsdp_ckpt_test {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string output;
  std::string errors;
};

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string file_of(const std::string& head, const std::string& data) {
  const auto length = static_cast<std::uint64_t>(head.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + head + data;
}

/// One folder with Python's checkpoints for all tests; each writes what it writes under names of its own.
class FsdpCkpt : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = new testing::TemporaryFolder;
    python("write");
  }
  static void TearDownTestSuite() {
    delete folder;
    folder = nullptr;
  }

  static void python(const std::string& command) { testing::run_peer(testing::kToolPeer, {command, folder->path().string()}); }

  /// Runs the command in the folder.
  static Outcome run(const std::string& arguments) {
    const auto out = folder->path() / "out";
    const auto err = folder->path() / "err";
    const std::string line = "cd '" + folder->path().string() + "' && timeout 60 '" + testing::kFsdpCkpt + "' " + arguments + " >out 2>err";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(out), read(err)};
  }

  static void expect_output(const std::string& arguments, const std::string& output, int exit_code = 0) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments;
    EXPECT_EQ(outcome.errors, "") << arguments;
    EXPECT_EQ(outcome.output, output) << arguments;
  }

  static void expect_part(const std::string& arguments, const std::string& part, int exit_code = 0) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments << outcome.errors;
    EXPECT_NE(outcome.output.find(part), std::string::npos) << part << "\nis not in\n" << outcome.output;
  }

  static void expect_error(const std::string& arguments, const std::string& part) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.output, "") << arguments;
    EXPECT_EQ(outcome.errors.rfind("fsdp-ckpt: ", 0), 0U) << outcome.errors;
    EXPECT_NE(outcome.errors.find(part), std::string::npos) << part << "\nis not in\n" << outcome.errors;
  }

  static inline testing::TemporaryFolder* folder = nullptr;
};

TEST_F(FsdpCkpt, TellsItsVersion) { expect_output("--version", std::string(fsdp::version()) + "\n"); }

TEST_F(FsdpCkpt, Inspects) {
  const std::string output = run("inspect dcp").output;
  const auto expect = [&](const std::string& line) {
    EXPECT_NE(output.find(line), std::string::npos) << line << "\nis not in\n" << output;
  };
  expect("dcp: torch.distributed.checkpoint, without checksums (written by Python)\n2 files\n  .metadata");
  expect("7 tensors, 4400112 bytes (4.20 MiB)\n  model.large.weight  float32   [1100, 1000]  1 part  4400000 bytes (4.20 MiB)\n");
  expect("  model.half          float16   [3, 5]        1 part  30 bytes\n");
  expect("  model.scalar        float32   []            1 part  4 bytes\n");
  expect("2 values\n  step  7\n  name  'a \\'run\\'\\x0a'\n");
  expect_part("inspect two_ranks", "columns  int64    [2, 4]  2 parts  64 bytes");
  expect_part("inspect python.safetensors", "6 tensors, 4400096 bytes (4.20 MiB)\n");
  expect_error("inspect nowhere", "there is no checkpoint nowhere");
}

TEST_F(FsdpCkpt, Verifies) {
  expect_output("verify dcp", "dcp: whole: 7 tensors, 2 values, by the records' own checksums\n");
  expect_output("verify python.safetensors",
                "python.safetensors: whole: 6 tensors, 0 values, no checksums: places and sizes were checked, not contents\n");
  ASSERT_EQ(run("convert python.safetensors ours --max-file-size 1MB").exit_code, 0);
  expect_output("verify ours", "ours: whole: 6 tensors, 0 values, 4 checksums\n");
  expect_part("inspect ours", "ours: torch.distributed.checkpoint, complete\n5 files\n");

  // All that is wrong, in one go.
  const fs::path step = folder->path() / "ours";
  fs::resize_file(step / "__0_0.distcp", 100);
  {
    std::fstream file(step / "__0_1.distcp", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(900);
    file.put('!');
  }
  const Outcome outcome = run("verify ours");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.output.find("__0_0.distcp has 100 bytes instead of"), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("__0_1.distcp has the checksum"), std::string::npos) << outcome.output;
  expect_part("inspect ours", "ours: torch.distributed.checkpoint, NOT COMPLETE\n");
  fs::remove(step / ".fsdp-checksums");
  expect_part("verify ours", "it was cut off", 1);
  fs::remove(step / ".metadata");
  expect_part("verify ours", ".metadata: No such file", 1);
  expect_error("verify nowhere", "there is no checkpoint nowhere");
}

// A name that would make a terminal red, and one that would forge a line.
TEST_F(FsdpCkpt, NamesAreNoCommandsForATerminal) {
  const std::string head =
      R"({"red\u001b[31m":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"two\nlines":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  folder->write("names.safetensors", file_of(head, "xy"));
  ASSERT_EQ(run("convert names.safetensors names").exit_code, 0);
  for (const std::string arguments : {"inspect names.safetensors", "inspect names", "diff names dcp", "diff names python.safetensors"}) {
    expect_part(arguments, "red\\x1b[31m", arguments.starts_with("diff") ? 1 : 0);
    expect_part(arguments, "two\\x0alines", arguments.starts_with("diff") ? 1 : 0);
  }
  fs::remove(folder->path() / "names/.fsdp-checksums");
  fs::resize_file(folder->path() / "names/__0_0.distcp", 900);
  for (const std::string arguments : {"inspect names", "verify names", "diff names names.safetensors", "convert names none"}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ((outcome.output + outcome.errors).find('\x1b'), std::string::npos) << arguments;
  }
}

// A dtype that torch lacks, and one whose elements are two numbers each.
TEST_F(FsdpCkpt, OnlyTheTensorThatCannotBeReadIsLeftOut) {
  const std::string head =
      R"({"four":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]},"one":{"dtype":"U8","shape":[1],"data_offsets":[5,6]},)"
      R"("six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[2,5]},"scale":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[6,7]}})";
  folder->write("six.safetensors", file_of(head, "\x21\x43...1\x7f"));
  folder->write("seven.safetensors", file_of(head, "\x21\x73...1\x80"));
  const std::string why = "its dtype F6_E2M3 is not supported";
  expect_part("inspect six.safetensors", "4 tensors, 7 bytes\n  four   float4_e2m1fn_x2 ");
  expect_part("inspect six.safetensors", "  six    cannot be read: " + why + "  [4]     1 part  3 bytes\n");
  expect_part("verify six.safetensors", "whole: 4 tensors");
  expect_part("verify six.safetensors", "  cannot be read: 'six': " + why + "\n");
  expect_output("diff six.safetensors seven.safetensors",
                "model.four: 1 of 4 elements differ, by 4 at most\n"
                "model.scale: 1 of 1 elements differ, by 1 at most\n"
                "model.six: cannot be read in six.safetensors: " +
                    why + "\n3 differences, 1 equal\n",
                1);
  for (const std::string options : {"", "_half --dtype fp16"}) {
    expect_output("convert six.safetensors readable" + options,
                  "readable" + options.substr(0, options.find(' ')) + ": 3 tensors, " + (options.empty() ? "4" : "5") +
                      " bytes\n  cannot be read, and is left out: 'model.six': " + why + "\n",
                  1);
  }
  expect_output("diff six.safetensors readable --ignore model.six", "0 differences, 3 equal, 1 ignored\n");
  expect_part("inspect readable_half", "  model.four   float4_e2m1fn_x2  [2, 1]");
  expect_part("inspect readable_half", "  model.scale  float16 ");
  ASSERT_EQ(run("convert readable back_again").exit_code, 0);
  expect_output("diff readable back_again", "0 differences, 3 equal\n");
}

TEST_F(FsdpCkpt, ConvertReplacesNothing) {
  fs::copy(folder->path() / "dcp", folder->path() / "precious");
  ASSERT_EQ(run("convert python.safetensors precious_too").exit_code, 0);
  for (const char* arguments : {"precious precious", "precious precious/", "python.safetensors precious", "precious precious_too",
                                "python.safetensors python.safetensors"}) {
    expect_error(std::string("convert ") + arguments, "is there already, and what is written here replaces nothing");
  }
  expect_output("diff precious dcp", "0 differences, 9 equal\n");
  expect_output("diff precious_too python.safetensors", "0 differences, 6 equal\n");
  // A finished conversion has nothing but the checkpoint's files.
  ASSERT_EQ(run("convert precious published").exit_code, 0);
  for (const auto& entry : fs::directory_iterator(folder->path() / "published")) EXPECT_EQ(entry.path().filename(), "model.safetensors");
}

TEST_F(FsdpCkpt, ConvertsBothWays) {
  expect_output("convert dcp one", "one: 6 tensors, 4400096 bytes (4.20 MiB); left out: 3 items that are no tensors below 'model.'\n");
  expect_output("convert python.safetensors back", "back: 6 tensors, 4400096 bytes (4.20 MiB)\n");
  for (const std::string more :
       {"dcp many --max-file-size 40B", "dcp bfloat16 --dtype bf16", "dcp float16 --dtype fp16", "dcp float32 --dtype fp32",
        "two_ranks two_ranks_converted --prefix ''", "many back_many --prefix net. --max-file-size 50B"}) {
    EXPECT_EQ(run("convert " + more).exit_code, 0) << more;
  }
  python("check_converted");
  expect_output("verify back_many", "back_many: whole: 6 tensors, 0 values, 7 checksums\n");
  expect_output("diff one python.safetensors", "0 differences, 6 equal\n");
  expect_output("diff back one", "0 differences, 6 equal\n");

  expect_error("convert dcp none --prefix net.", "dcp has no tensor whose name begins with 'net.'");
  expect_error("convert dcp one", "one is there already");
  expect_error("convert dcp none --max-file-size 0B", "must be positive");
  expect_error("convert dcp none --dtype int8", "--dtype");
  expect_error("convert nowhere none", "there is no checkpoint nowhere");
  // What fails leaves nothing.
  fs::copy(folder->path() / "dcp", folder->path() / "cut");
  fs::resize_file(folder->path() / "cut/__0_0.distcp", 4000);
  expect_error("convert cut none", "it was cut off");
  for (const auto& entry : fs::directory_iterator(folder->path())) {
    EXPECT_NE(entry.path().filename().string().rfind(".tmp", 0), 0U) << entry.path();
    EXPECT_NE(entry.path().filename(), "none");
  }
}

// Two ranks of Python wrote a file of safetensors each.
TEST_F(FsdpCkpt, ReadsWhatRanksWroteAsSafetensors) {
  expect_part("inspect shards", "shards: safetensors\n2 files\n  shard-00001-model-00001-of-00001.safetensors");
  expect_part("inspect shards", "columns  int64    [2, 4]  2 parts  64 bytes");
  expect_part("verify shards", "shards: whole: 3 tensors, 0 values, no checksums");
  ASSERT_EQ(run("convert two_ranks as_one --prefix ''").exit_code, 0);
  expect_output("diff shards as_one", "0 differences, 3 equal\n");
  fs::remove(folder->path() / "shards/shard-00001-model-00001-of-00001.safetensors");
  expect_part("verify shards", "'rows': its parts have 6 of 15 elements", 1);
  expect_error("diff shards as_one", "leave out elements that are needed");
}

TEST_F(FsdpCkpt, ListsDifferences) {
  expect_output("diff dcp dcp", "0 differences, 9 equal\n");
  expect_output("diff dcp other",
                "model.bfloat: bfloat16 [7] | bfloat16 [6]\n"
                "model.count: only in dcp\n"
                "model.half: float16 [3, 5] | float32 [3, 5], equal values\n"
                "model.large.weight: 1 of 1100000 elements differ, by 0.5 at most\n"
                "model.new: only in other\n"
                "step: 7 | 8\n"
                "6 differences, 4 equal\n",
                1);
  expect_output("diff dcp other --ignore model. --ignore st", "0 differences, 2 equal, 8 ignored\n");
  expect_part("diff dcp python.safetensors", "optim.m: only in dcp\n", 1);
  expect_error("diff dcp nowhere", "there is no checkpoint nowhere");
}

TEST_F(FsdpCkpt, ExplainsItself) {
  expect_part("--help", "inspect");
  expect_part("convert --help", "--max-file-size");
  expect_error("convert dcp none --max-file-size 40", "--max-file-size: '40' is no size");
  expect_error("inspekt dcp", "there is no command 'inspekt'; these are there: inspect verify convert diff");
  expect_error("inspect", "path is required");
}

}  // namespace fsdp_ckpt_test
}  // namespace fsdp
