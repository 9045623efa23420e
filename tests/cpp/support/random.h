#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace fsdp::testing {

/// The same numbers with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound)); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

/// A well-mixed function of its arguments (the finalizer of splitmix64), for decisions that must not depend on when they are asked for.
inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a + 0x9e3779b97f4a7c15ULL * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline std::uint64_t mixed(std::uint64_t seed, std::string_view name) {
  for (const char c : name) seed = mixed(seed, static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
  return seed;
}

}  // namespace fsdp::testing
