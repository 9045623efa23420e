#include "train_gpt/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

namespace {

constexpr std::size_t kWidestBar = 30;
constexpr auto kBetweenLines = std::chrono::seconds(5);

std::size_t columns() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// A bar in front, as wide as the terminal leaves room for. A line that is wider than the terminal would wrap, and could not be overwritten.
std::string with_bar(double done, const std::string& text) {
  constexpr std::size_t kFrame = 4;  // brackets, a space, and the last column
  const std::size_t width = std::min(kWidestBar, columns() - std::min(columns(), text.size() + kFrame));
  const auto filled = static_cast<std::size_t>(std::clamp(done, 0.0, 1.0) * static_cast<double>(width));
  return ("[" + std::string(filled, '#') + std::string(width - filled, '.') + "] " + text).substr(0, columns() - 1);
}

std::string describe(const TrainedStep& trained) {
  const auto left = static_cast<long>(trained.seconds_left + 0.5);
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "%3.0f%%  step %ld  loss %.4f  %.0f tokens/s  gradient norm %.2f  %ld:%02ld left",
                100 * trained.done, static_cast<long>(trained.step), trained.loss, trained.tokens_per_second, trained.grad_norm, left / 60,
                left % 60);
  return text.data();
}

}  // namespace

Progress::Progress() : terminal_(isatty(STDOUT_FILENO) != 0) {}

void Progress::step(const TrainedStep& trained) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_) {
    if (now - shown_ < kBetweenLines) return;
    shown_ = now;
    std::puts(describe(trained).c_str());
  } else {
    constexpr const char* kEraseToEnd = "\x1b[K";
    std::printf("\r%s%s", with_bar(trained.done, describe(trained)).c_str(), kEraseToEnd);
    bar_open_ = true;
  }
  std::fflush(stdout);
}

void Progress::line(const std::string& text) {
  if (std::exchange(bar_open_, false)) std::puts("");
  std::puts(text.c_str());
  std::fflush(stdout);
}
