#pragma once

#include <cstdint>
#include <variant>

// Rotary embeddings (Su et al., 2021) as config.json asks for them: plain, or stretched to longer sequences in one of transformers' ways.

namespace llama {

/// All positions come closer together.
struct LinearRope {
  double factor = 1;
};

/// The base grows with the sequence, once that is longer than `trained`.
struct DynamicRope {
  double factor = 1;
  std::int64_t trained = 0;
};

/// Llama 3.1's: slow turns are slowed down, fast ones stay.
struct Llama3Rope {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double trained = 8192;  ///< The longest sequence before.
};

/// YaRN (Peng et al., 2023): likewise, and attention is sharper.
struct YarnRope {
  double factor = 1;
  double attention_factor = 1;  ///< Of cosines and sines.
  double beta_fast = 32;        ///< Elements that turn more often than this within `trained` stay,
  double beta_slow = 1;         ///< and those that turn less often are slowed down.
  double trained = 0;
  bool truncates = true;  ///< These borders are whole numbers of elements.
};

/// Only a part of each head is rotated.
struct ProportionalRope {
  double factor = 1;
  double part = 1;
};

struct Rope {
  double theta = 10'000;
  std::variant<std::monostate, LinearRope, DynamicRope, Llama3Rope, YarnRope, ProportionalRope> scaling;
};

}  // namespace llama
