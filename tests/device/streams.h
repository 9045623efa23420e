#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "access_map.h"
#include "capture.h"
#include "clock.h"
#include "device.h"

namespace sim {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;

int current_device();
int exchange_device(int device);
int index_of(c10::Device device);  ///< The current one, if it has no index.

c10::Stream current_stream(int device);
c10::Stream exchange_current_stream(c10::Stream stream);
c10::Stream default_stream(int device);
c10::Stream new_stream(int device);
std::size_t agent_of(c10::Stream stream);

/// What the next operation of the stream would know: what came before it there, and what this thread knows.
Clock clock_of(c10::Stream stream);

enum class Counts { kAsKernel, kAsCollective, kNot };
struct Launched {
  Clock clock;  ///< The stream's, behind it.
  Access access;
};
/// Notes an operation on the stream, and reports what it is not ordered behind. Before it runs: what it would read may be wrong. It does
/// not begin before the simulated time `not_before`, which orders nothing else.
Launched launch(c10::Stream stream, const std::string& name, std::span<const Range> ranges, Counts counts = Counts::kAsKernel,
                std::uint64_t not_before = 0);
/// A point in the stream's work, that others can wait for.
struct Point {
  Clock clock;
  CaptureId capture = 0;
};
Point point_of(c10::Stream stream);
void stream_waits(c10::Stream stream, const Point& point);
/// The host waits, in this thread. What copies have put into pinned memory arrives.
void host_waits(int device, const Clock& clock, const std::string& reason);
/// The host has found that something is over, without waiting.
void host_finds(const Clock& clock);
/// The host waits for all streams, and for all collectives.
void synchronize(int device);
/// complete() is called by the first wait for the whole device, if `owner` still exists then.
void complete_at_synchronize(int device, std::weak_ptr<void> owner, std::function<void()> complete);

AccessMap& accesses();
void report(const std::string& text);
std::size_t name_operation(const std::string& name);
std::string describe(const Access& access);
const Options& options();
Stats& stats_of(int device);

/// What a tensor's elements occupy: exactly, if they are dense or have one outer stride; else from the first to the last.
void add_ranges(std::vector<Range>& ranges, const at::Tensor& tensor, bool write);

}  // namespace sim
