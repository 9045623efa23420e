#include "llama/tokenizer.h"

#include <stdexcept>

namespace llama {
namespace {

namespace fs = std::filesystem;

/// A file of a tokenizer that only Python reads; empty if there is none.
std::string other_tokenizer(const fs::path& folder) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "vocab.json", "tekken.json"}) {
    if (fs::exists(folder / name)) return name;
  }
  return "";
}

}  // namespace

Tokenizer::Tokenizer(const fs::path& folder) {
  if (const auto file = folder / "tokenizer.model"; fs::exists(file)) {
    pieces_ = open_pieces(file);
  } else if (const auto other = other_tokenizer(folder); !other.empty()) {
    throw std::runtime_error("the tokenizer in " + folder.string() + " (" + other +
                             ") is not a tokenizer.model, the only kind that this program reads: make tokens of the text with Python's "
                             "transformers");
  }
}

std::vector<std::int32_t> Tokenizer::encode(const std::string& text) const {
  std::vector<std::int32_t> tokens;
  if (!pieces_) {
    for (const unsigned char byte : text) tokens.push_back(byte);
    return tokens;
  }
  tokens = pieces_->encode(text);
  if (const auto begin = pieces_->begin()) tokens.insert(tokens.begin(), *begin);
  return tokens;
}

std::string Tokenizer::decode(const std::vector<std::int32_t>& tokens) const {
  if (pieces_) return pieces_->decode(tokens);
  std::string text;
  for (const auto token : tokens) text.push_back(static_cast<char>(token));
  return text;
}

std::vector<std::int32_t> Tokenizer::ends() const {
  if (pieces_ && pieces_->end()) return {*pieces_->end()};
  return {};
}

}  // namespace llama
