#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <vector>

// Tokens for fine-tuning. Reading them uses no torch thread, so a program can read once and fork its ranks afterwards.

namespace llama {

/// The tokens of a file, cut into sequences, which are shuffled anew in every epoch.
class Tokens {
 public:
  /// Of "*.bin", int32 tokens in the machine's byte order, as numpy's `tofile` writes them. Any other file is text, for the tokenizer in
  /// `model`, a folder. Throws std::runtime_error with one line of text if it can't be read, if a token is not below `vocab_size`, or if
  /// there are fewer than `context` + 1.
  Tokens(const std::filesystem::path& file, const std::filesystem::path& model, std::int64_t context, std::int64_t vocab_size);

  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  /// Sequences per epoch.
  std::int64_t sequences() const { return (size() - 1) / context_; }
  /// Sequences `first` to `first + count` of the run, [count, context + 1] (int64, on the CPU): the same for whoever asks. The last token
  /// of a sequence is the first one of the next.
  at::Tensor batch(std::int64_t first, std::int64_t count, std::uint64_t seed);

 private:
  std::vector<std::int32_t> tokens_;
  std::int64_t context_;
  std::int64_t epoch_ = -1;
  at::Tensor order_;  // of the epoch
};

}  // namespace llama
