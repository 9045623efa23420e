#include <sentencepiece_processor.h>

#include <stdexcept>

#include "llama/pieces.h"

namespace llama {
namespace {

void check(const sentencepiece::util::Status& status, const std::string& what) {
  if (!status.ok()) throw std::runtime_error(what + ": " + status.ToString());
}

class SentencePieces : public Pieces {
 public:
  explicit SentencePieces(const std::filesystem::path& file) {
    check(processor_.Load(file.string()), "cannot read " + file.string() + " with libsentencepiece");
  }
  std::vector<std::int32_t> encode(const std::string& text) const override {
    std::vector<int> tokens;
    check(processor_.Encode(text, &tokens), "cannot tokenize the text");
    return tokens;
  }
  std::string decode(const std::vector<std::int32_t>& tokens) const override {
    std::string text;
    check(processor_.Decode(tokens, &text), "cannot decode tokens");
    return text;
  }
  std::optional<std::int32_t> begin() const override { return token(processor_.bos_id()); }
  std::optional<std::int32_t> end() const override { return token(processor_.eos_id()); }

 private:
  static std::optional<std::int32_t> token(int id) { return id < 0 ? std::nullopt : std::optional(id); }

  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::unique_ptr<Pieces> open_pieces(const std::filesystem::path& file) { return std::make_unique<SentencePieces>(file); }

}  // namespace llama
