#pragma once

#include <chrono>
#include <cstdint>
#include <string>

struct TrainedStep {
  std::int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double tokens_per_second = 0;
  std::int64_t peak_bytes = 0;  ///< Of the engine's memory on this rank.
  double done = 0;              ///< Share of the run, in [0, 1].
  double seconds_left = 0;
};

/// Progress on stdout: a bar that is drawn anew with each step on a terminal, elsewhere a line every five seconds.
class Progress {
 public:
  Progress();

  void step(const TrainedStep& trained);
  /// A line of its own, below the bar as it stands.
  void line(const std::string& text);

 private:
  const bool terminal_;
  bool bar_open_ = false;  // the bar is on the terminal's last line
  std::chrono::steady_clock::time_point shown_{};
};
