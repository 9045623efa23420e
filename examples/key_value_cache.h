#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <utility>
#include <vector>

// What attention keeps while text is generated: keys and values of the tokens so far, so that each further token is computed alone.

/// Of one layer.
class LayerCache {
 public:
  explicit LayerCache(std::int64_t capacity) : capacity_(capacity) {}

  /// Tokens in it.
  std::int64_t length() const { return length_; }
  /// Adds keys and values of further tokens, each [batch, heads, time, width], and returns those of all.
  std::pair<at::Tensor, at::Tensor> append(const at::Tensor& keys, const at::Tensor& values) {
    const auto time = keys.size(2);
    if (!keys_.defined()) {
      keys_ = at::empty({keys.size(0), keys.size(1), capacity_, keys.size(3)}, keys.options());
      values_ = at::empty_like(keys_);
    }
    keys_.narrow(2, length_, time).copy_(keys);
    values_.narrow(2, length_, time).copy_(values);
    length_ += time;
    return {keys_.narrow(2, 0, length_), values_.narrow(2, 0, length_)};
  }
  void clear() { length_ = 0; }

 private:
  std::int64_t capacity_;
  std::int64_t length_ = 0;
  at::Tensor keys_, values_;  // [batch, heads, capacity, width], made when the first come
};

/// Of a model. A forward that is given one takes all tokens of a beginning, or one token that follows those before; without gradients.
class KeyValueCache {
 public:
  /// For so many tokens.
  KeyValueCache(std::int64_t layers, std::int64_t capacity) : layers_(static_cast<std::size_t>(layers), LayerCache(capacity)) {}

  LayerCache& layer(std::size_t index) { return layers_[index]; }
  /// Tokens in every layer, between two forwards.
  std::int64_t length() const { return layers_.front().length(); }
  void clear() {
    for (auto& layer : layers_) layer.clear();
  }

 private:
  std::vector<LayerCache> layers_;
};
