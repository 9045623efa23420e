#include "llama/tokens.h"

#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "llama/tokenizer.h"

namespace llama {

Tokens::Tokens(const std::filesystem::path& file, const std::filesystem::path& model, std::int64_t context, std::int64_t vocab_size)
    : context_(context) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream || std::filesystem::is_directory(file)) throw std::runtime_error("cannot read --data " + file.string());
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  if (file.extension() == ".bin") {
    if (bytes.size() % sizeof(std::int32_t) != 0) throw std::runtime_error(file.string() + " does not hold whole int32 tokens");
    tokens_.resize(bytes.size() / sizeof(std::int32_t));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tokens_.data()));
  } else {
    tokens_ = Tokenizer(model).encode(bytes);
  }
  if (size() <= context) {
    throw std::runtime_error(file.string() + " holds " + std::to_string(size()) + " tokens; --context " + std::to_string(context) +
                             " needs one more than that");
  }
  for (std::int64_t i = 0; i < size(); ++i) {
    const auto token = tokens_[static_cast<std::size_t>(i)];
    if (token < 0 || token >= vocab_size) {
      throw std::runtime_error(file.string() + ": token " + std::to_string(i) + " is " + std::to_string(token) + ", and the model has " +
                               std::to_string(vocab_size) + " of them");
    }
  }
}

at::Tensor Tokens::batch(std::int64_t first, std::int64_t count, std::uint64_t seed) {
  auto rows = at::empty({count, context_ + 1}, at::kLong);
  for (std::int64_t i = 0; i < count; ++i) {
    if (const auto epoch = (first + i) / sequences(); epoch != epoch_) {
      epoch_ = epoch;
      order_ = at::randperm(sequences(), at::detail::createCPUGenerator(seed + static_cast<std::uint64_t>(epoch)));
    }
    const auto begin = order_[(first + i) % sequences()].item<std::int64_t>() * context_;
    std::copy_n(tokens_.begin() + begin, context_ + 1, rows.data_ptr<std::int64_t>() + i * (context_ + 1));
  }
  return rows;
}

}  // namespace llama
