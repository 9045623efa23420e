#include "corpus.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "support/messages.h"
#include "support/temporary_folder.h"

namespace fsdp {
namespace corpus_test {

using testing::TemporaryFolder;

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Files as they lie in a part of the corpus: each begins with kStart.
std::vector<std::string> files_of(const std::vector<std::uint8_t>& bytes) {
  std::vector<std::string> files;
  for (const std::uint8_t byte : bytes) {
    if (byte == Corpus::kStart) {
      files.emplace_back();
    } else {
      files.back().push_back(static_cast<char>(byte));
    }
  }
  return files;
}

std::string error_of(const std::filesystem::path& path) {
  return fsdp::testing::message_of<std::runtime_error>([&] { const Corpus corpus(path); });
}

// 200 files in 100 groups: two names of each group start with the same word.
void write_groups(const TemporaryFolder& folder) {
  for (int i = 0; i < 100; ++i) {
    const std::string group = "g" + std::to_string(i);
    folder.write("ops/" + group + ".h", "text of " + group);
    folder.write("ops/_" + group + "_native.h", "more text of " + group);
  }
}

TEST(Corpus, SplitsAFolderByGroupsWithoutOverlap) {
  const TemporaryFolder folder;
  write_groups(folder);
  const Corpus corpus(folder.path());
  const auto train = files_of(corpus.train());
  const auto validation = files_of(corpus.validation());
  EXPECT_EQ(corpus.files(), 200);
  EXPECT_EQ(train.size() + validation.size(), 200u);
  EXPECT_GE(validation.size(), 2u);
  EXPECT_LE(validation.size(), 30u);  // a twentieth in the mean
  const auto groups = [](const std::vector<std::string>& files) {
    std::set<std::string> names;
    for (const auto& file : files) names.insert(file.substr(file.find_last_of(' ')));
    return names;
  };
  const auto held_out = groups(validation);
  EXPECT_EQ(held_out.size() * 2, validation.size());  // both files of a group
  for (const auto& group : groups(train)) EXPECT_FALSE(held_out.contains(group)) << group;
}

TEST(Corpus, IsTheSameForEqualRelativePaths) {
  const TemporaryFolder one;
  const TemporaryFolder other;
  write_groups(one);
  write_groups(other);
  EXPECT_EQ(Corpus(one.path()).train(), Corpus(other.path()).train());
  EXPECT_EQ(Corpus(one.path()).validation(), Corpus(other.path()).validation());
}

TEST(Corpus, ANewFileMovesNoOther) {
  const TemporaryFolder folder;
  write_groups(folder);
  const Corpus before(folder.path());
  folder.write("ops/new.h", "new");
  const Corpus after(folder.path());
  auto train = files_of(after.train());
  auto validation = files_of(after.validation());
  std::erase(train, "new");
  std::erase(validation, "new");
  EXPECT_EQ(train, files_of(before.train()));
  EXPECT_EQ(validation, files_of(before.validation()));
}

TEST(Corpus, LeavesOutCopiesHiddenFilesAndBinaries) {
  const TemporaryFolder folder;
  folder.write("a.txt", "first");
  folder.write("b.txt", "second");
  folder.write("copy_of_a.txt", "first");
  folder.write(".hidden.txt", "hidden");
  folder.write(".git/config", "hidden, too");
  folder.write("binary", std::string("bi\0nary", 7));
  folder.write("empty.txt", "");
  std::filesystem::create_symlink("itself", folder.path() / "itself");
  std::filesystem::create_symlink("nowhere", folder.path() / "broken");
  const Corpus corpus(folder.path());
  EXPECT_EQ(corpus.files(), 2);
  auto files = files_of(corpus.train());
  for (const auto& file : files_of(corpus.validation())) files.push_back(file);
  std::sort(files.begin(), files.end());
  EXPECT_EQ(files, (std::vector<std::string>{"first", "second"}));
}

TEST(Corpus, HoldsOutTheLastTwentiethOfASingleFile) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 999; ++i) text.push_back(static_cast<char>('a' + i % 26));
  const Corpus corpus(folder.write("text", text));
  EXPECT_EQ(corpus.files(), 1);
  EXPECT_EQ(corpus.validation().size(), 50u);
  EXPECT_EQ(corpus.train().front(), Corpus::kStart);
  EXPECT_EQ(text_of(corpus.train()).substr(1) + text_of(corpus.validation()), text);
}

TEST(Corpus, SplitsASingleGroup) {
  const TemporaryFolder folder;
  folder.write("a_1.txt", std::string(500, 'x'));
  folder.write("a_2.txt", std::string(498, 'y'));
  const Corpus corpus(folder.path());
  EXPECT_EQ(corpus.train().size(), 950u);
  EXPECT_EQ(text_of(corpus.validation()), std::string(50, 'y'));
}

TEST(Corpus, SaysWhyItCannotRead) {
  const TemporaryFolder folder;
  const auto nowhere = folder.path() / "nowhere";
  EXPECT_EQ(error_of(nowhere), nowhere.string() + " does not exist");
  const auto loop = folder.path() / "loop";
  std::filesystem::create_symlink("loop", loop);
  EXPECT_EQ(error_of(loop), "cannot read " + loop.string() + ": Too many levels of symbolic links");
  const auto binary = folder.write("binary", std::string(10, '\0'));
  EXPECT_EQ(error_of(binary), binary.string() + " is not a text file");
  const auto empty = folder.write("empty", "");
  EXPECT_EQ(error_of(empty), empty.string() + " is empty");
  EXPECT_EQ(error_of(folder.path()), folder.path().string() + " holds no text");
}

class CorpusBatches : public ::testing::Test {
 protected:
  static std::string text() {
    std::string all;
    for (int i = 0; i < 400; ++i) all += std::to_string(i * i) + " ";
    return all;
  }
  static constexpr std::int64_t kContext = 16;
  TemporaryFolder folder_;
  Corpus corpus_{folder_.write("text", text())};
};

TEST_F(CorpusBatches, TargetsAreTheNextTokens) {
  const auto [tokens, targets] = corpus_.sample({.seed = 1, .step = 0, .first = 0, .count = 8}, kContext);
  ASSERT_EQ(tokens.sizes(), (std::vector<std::int64_t>{8, kContext}));
  ASSERT_EQ(tokens.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(tokens.slice(1, 1), targets.slice(1, 0, -1)));
  const auto train = text_of(corpus_.train());
  for (int i = 0; i < 8; ++i) {
    std::string row;
    for (int t = 0; t < kContext; ++t) row.push_back(static_cast<char>(tokens[i][t].item<std::int64_t>()));
    row.push_back(static_cast<char>(targets[i][kContext - 1].item<std::int64_t>()));
    EXPECT_NE(train.find(row), std::string::npos) << row;
  }
}

TEST_F(CorpusBatches, DependOnTheNumberOfTheSequenceAlone) {
  const auto whole = corpus_.sample({.seed = 3, .step = 7, .first = 0, .count = 12}, kContext);
  for (const std::int64_t ranks : {2, 3, 4}) {
    std::vector<at::Tensor> tokens;
    std::vector<at::Tensor> targets;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const auto part = corpus_.sample({.seed = 3, .step = 7, .first = rank * 12 / ranks, .count = 12 / ranks}, kContext);
      tokens.push_back(part.tokens);
      targets.push_back(part.targets);
    }
    EXPECT_TRUE(at::equal(at::cat(tokens), whole.tokens)) << ranks << " ranks";
    EXPECT_TRUE(at::equal(at::cat(targets), whole.targets)) << ranks << " ranks";
  }
}

TEST_F(CorpusBatches, DifferByStepAndSeed) {
  const auto batch = corpus_.sample({.seed = 3, .step = 7, .first = 0, .count = 4}, kContext);
  EXPECT_FALSE(at::equal(batch.tokens, corpus_.sample({.seed = 3, .step = 8, .first = 0, .count = 4}, kContext).tokens));
  EXPECT_FALSE(at::equal(batch.tokens, corpus_.sample({.seed = 4, .step = 7, .first = 0, .count = 4}, kContext).tokens));
}

TEST_F(CorpusBatches, ValidationCoversTheTextEvenly) {
  const auto whole = corpus_.validation_batch(0, 6, 6, kContext);
  const auto first = corpus_.validation_batch(0, 3, 6, kContext);
  const auto second = corpus_.validation_batch(3, 3, 6, kContext);
  EXPECT_TRUE(at::equal(at::cat({first.tokens, second.tokens}), whole.tokens));
  EXPECT_EQ(whole.tokens[0][0].item<std::int64_t>(), corpus_.validation()[0]);
  const auto past_the_end = corpus_.validation_batch(5, 2, 6, kContext);
  EXPECT_TRUE(at::equal(past_the_end.tokens[0], past_the_end.tokens[1]));
}

TEST_F(CorpusBatches, TakeTheWholeTextAndNoMore) {
  const auto all = static_cast<std::int64_t>(corpus_.train().size());
  const auto batch = corpus_.sample({.count = 2}, all - 1);
  EXPECT_TRUE(at::equal(batch.tokens[0], batch.tokens[1]));
  EXPECT_EQ(batch.targets[0][all - 2].item<std::int64_t>(), corpus_.train().back());
  EXPECT_THROW(corpus_.sample({.count = 1}, all), std::runtime_error);
  EXPECT_THROW(corpus_.validation_batch(0, 1, 1, static_cast<std::int64_t>(corpus_.validation().size())), std::runtime_error);
}

}  // namespace corpus_test
}  // namespace fsdp
