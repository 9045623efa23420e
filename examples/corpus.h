#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

// Text for training, one token per byte. Reading it uses no torch thread, so a program can read once and fork its ranks afterwards.

/// Where a batch comes from: sequences are numbered over all ranks, and number `first + i` of a step is the same whoever draws it.
struct BatchSlice {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t first = 0;  ///< Number, in the whole batch, of this rank's first sequence.
  std::int64_t count = 1;  ///< Sequences that this rank takes.
};

/// Tokens [sequences, context] and the tokens that follow each of them, both int64 on the CPU.
struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

/// A file, or all text files below a folder, held as bytes and split into training and validation.
///
/// Of a folder, hidden files, files with a NUL byte and copies of another file are left out; the rest is taken in the order of
/// their paths. Whole groups of files are held out: files of one folder whose names start with the same word (`add.h`,
/// `_add_relu.h` and `add_native.h`) often repeat each other, so they go to the same side. Groups whose path hashes into the
/// lowest twentieth are for validation, and the group with the lowest hash always is. So the split depends on relative
/// paths only, and a new file does not move old ones (unless its group has the lowest hash). A single file or group gives its last
/// twentieth.
///
/// Each file starts with the token kStart, which no text holds.
class Corpus {
 public:
  static constexpr std::uint8_t kStart = 0;

  /// Reads `path`. Throws std::runtime_error with one line of text if there is nothing to read.
  explicit Corpus(const std::filesystem::path& path);

  const std::vector<std::uint8_t>& train() const { return train_; }
  const std::vector<std::uint8_t>& validation() const { return validation_; }
  std::int64_t files() const { return files_; }

  /// Sequences from random places of the training text, given by (seed, step, number of the sequence) alone.
  Batch sample(const BatchSlice& slice, std::int64_t context) const;

  /// Sequences `first` to `first + count` of `total` that lie evenly over the validation text; past the end, the last one is repeated.
  Batch validation_batch(std::int64_t first, std::int64_t count, std::int64_t total, std::int64_t context) const;

 private:
  std::vector<std::uint8_t> train_, validation_;
  std::int64_t files_ = 0;
};
