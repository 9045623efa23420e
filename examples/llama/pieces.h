#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// The file tokenizer.model of Llama 1 and 2, Mistral and others, which SentencePiece made. Its library (Debian's libsentencepiece-dev) is
// optional: where it was not found when this was built, no_sentencepiece.cpp stands for sentencepiece.cpp.

namespace llama {

class Pieces {
 public:
  virtual ~Pieces() = default;
  virtual std::vector<std::int32_t> encode(const std::string& text) const = 0;
  virtual std::string decode(const std::vector<std::int32_t>& tokens) const = 0;
  /// The tokens that begin and end a text; nothing where the file has none.
  virtual std::optional<std::int32_t> begin() const = 0;
  virtual std::optional<std::int32_t> end() const = 0;
};

/// Throws std::runtime_error with one line of text if the file can't be read, or the library is missing.
std::unique_ptr<Pieces> open_pieces(const std::filesystem::path& file);

}  // namespace llama
