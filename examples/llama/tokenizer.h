#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "llama/pieces.h"

namespace llama {

/// Text to tokens and back, as the folder of a model says: by its tokenizer.model, or, where a folder has no tokenizer at all, with each
/// byte a token. Uses no torch.
class Tokenizer {
 public:
  /// Throws std::runtime_error with one line of text if the folder's tokenizer is another one, or can't be read.
  explicit Tokenizer(const std::filesystem::path& folder);

  /// With the token that begins a text in front, if the tokenizer has one.
  std::vector<std::int32_t> encode(const std::string& text) const;
  std::string decode(const std::vector<std::int32_t>& tokens) const;
  /// The tokens that end a text.
  std::vector<std::int32_t> ends() const;

 private:
  std::unique_ptr<Pieces> pieces_;  // null: bytes
};

}  // namespace llama
