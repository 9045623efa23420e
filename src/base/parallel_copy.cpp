#include "base/parallel_copy.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/parallel_for.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace fsdp {
namespace {

// Copied data are used some time later: parameters when their turn in the unit comes, gradients when the rest of the unit's gradients
// exist. Copies of at least this size have mostly left the inner caches by then.
constexpr std::int64_t kPastCaches = std::int64_t{1} << 20;

#if defined(__x86_64__)

constexpr std::size_t kVector = sizeof(__m128i);
constexpr std::size_t kLine = 64;
constexpr std::size_t kPageBytes = 4096;
// The processor reads ahead within a page only. Copying from several pages in turn makes it read ahead in all of them.
constexpr std::size_t kTurnBytes = 4 * kPageBytes;

void copy_line_past_caches(char* target, const char* source) {
  for (std::size_t at = 0; at < kLine; at += kVector) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
  }
}

void copy_past_caches(char* target, const char* source, std::size_t bytes) {
  const std::size_t to_next_line = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine;
  const std::size_t head = std::min(bytes, to_next_line);
  std::memcpy(target, source, head);
  std::size_t done = head;
  for (; bytes - done >= kTurnBytes; done += kTurnBytes) {
    for (std::size_t line = 0; line < kPageBytes; line += kLine) {
      for (std::size_t page = 0; page < kTurnBytes; page += kPageBytes) {
        copy_line_past_caches(target + done + page + line, source + done + page + line);
      }
    }
  }
  _mm_sfence();  // These stores are not ordered before later ones, such as one that publishes the bytes.
  std::memcpy(target + done, source + done, bytes - done);
}

#else

void copy_past_caches(char* target, const char* source, std::size_t bytes) { std::memcpy(target, source, bytes); }

#endif

}  // namespace

void parallel_copy(void* target, const void* source, std::int64_t bytes) {
  constexpr std::int64_t kWorthAThread = 512 * 1024;  // Copying this much takes longer than waking a thread.
  parallel_for(bytes, kWorthAThread, [&](std::int64_t begin, std::int64_t end) {
    char* const to = static_cast<char*>(target) + begin;
    const char* const from = static_cast<const char*>(source) + begin;
    const auto size = static_cast<std::size_t>(end - begin);
    if (bytes < kPastCaches) {
      std::memcpy(to, from, size);
    } else {
      copy_past_caches(to, from, size);
    }
  });
}

}  // namespace fsdp
