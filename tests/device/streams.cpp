#include "streams.h"

#include <c10/util/Backtrace.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "graph.h"
#include "host_clock.h"
#include "pinned.h"

namespace sim {
namespace {

struct Pending {
  std::weak_ptr<void> owner;
  std::function<void()> complete;
};

struct State {
  std::vector<Clock> streams = std::vector<Clock>(1 + kDevices);  // by agent
  AccessMap accesses;
  std::vector<std::string> operations = {"(none)"};
  std::vector<std::string> reports;
  std::array<Stats, kDevices> stats;
  std::array<std::vector<Pending>, kDevices> pending;
  std::function<void(const std::string&)> before_host_wait;
  Options options;
  Cost cost;
};

State& state() {
  static auto* const made = new State;  // Tensors are freed when the program ends, too.
  return *made;
}

thread_local int device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> stream_of_thread = {};

c10::Stream stream_of(int device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, sim::device(device), id); }

const char* name_of(AccessMap::Conflict conflict) {
  switch (conflict) {
    case AccessMap::Conflict::kReadAfterWrite:
      return "read after write";
    case AccessMap::Conflict::kWriteAfterWrite:
      return "write after write";
    case AccessMap::Conflict::kWriteAfterRead:
      return "write after read";
  }
  return "";
}

void check(const Range& range, const Launched& launched) {
  bool told = false;  // One report for each range: the rest of it has the same reason.
  accesses().add(launched.clock, launched.access, range, [&](AccessMap::Conflict conflict, const Access& earlier) {
    if (std::exchange(told, true)) return;
    report(std::string(name_of(conflict)) + ": " + describe(launched.access) + " is not ordered behind " + describe(earlier) + ", in " +
           std::to_string(range.end - range.begin) + " bytes at " + std::to_string(range.begin));
  });
}

void check_written(const Range& range, const Access& access) {
  bool told = false;
  accesses().for_each(range.begin, range.end, [&](const Access& earlier) {
    if (state().operations[earlier.operation] == "allocate" && !std::exchange(told, true)) {
      report("not initialized: " + describe(access) + " reads what nobody has written since " + describe(earlier));
    }
  });
}

std::uint64_t duration(Counts counts, std::span<const Range> ranges) {
  const Cost& cost = state().cost;
  const auto bytes =
      std::accumulate(ranges.begin(), ranges.end(), 0.0, [](double sum, const Range& r) { return sum + double(r.end - r.begin); });
  switch (counts) {
    case Counts::kAsKernel:
      return cost.kernel + static_cast<std::uint64_t>(bytes * cost.kernel_byte);
    case Counts::kAsCollective:
      return cost.collective + static_cast<std::uint64_t>(bytes * cost.collective_byte);
    case Counts::kNot:
      return 0;
  }
  return 0;
}

std::int64_t total(const std::map<std::string, std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}, [](std::int64_t sum, const auto& one) { return sum + one.second; });
}

}  // namespace

int current_device() { return device_of_thread; }
int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "sim: there is no device ", device);
  return std::exchange(device_of_thread, device);
}
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_of_thread; }

c10::Stream current_stream(int device) { return stream_of(device, stream_of_thread[static_cast<std::size_t>(device)]); }
c10::Stream exchange_current_stream(c10::Stream stream) {
  const int device = index_of(stream.device());
  return stream_of(device, std::exchange(stream_of_thread[static_cast<std::size_t>(device)], stream.id()));
}
c10::Stream default_stream(int device) { return stream_of(device, 0); }
c10::Stream new_stream(int device) {
  const Lock lock;
  state().streams.emplace_back();
  return stream_of(device, static_cast<c10::StreamId>(state().streams.size() - 1));
}
std::size_t agent_of(c10::Stream stream) {
  return stream.id() == 0 ? 1 + static_cast<std::size_t>(stream.device_index()) : static_cast<std::size_t>(stream.id());
}

Clock clock_of(c10::Stream stream) {
  const Lock lock;
  Clock clock = state().streams[agent_of(stream)];
  clock.join(host_clock());
  return clock;
}

Launched launch(c10::Stream stream, const std::string& name, std::span<const Range> ranges, Counts counts, std::uint64_t not_before) {
  const Lock lock;
  if (counts != Counts::kNot) {
    host_works(state().cost.launch);
    ++stats_of(stream.device_index()).kernels[name];
    note_in_graph(stream, ranges);
  }
  Clock& clock = state().streams[agent_of(stream)];
  clock.join(host_clock());
  clock.pass_until(not_before);
  const auto epoch = clock.tick(agent_of(stream), duration(counts, ranges));
  Launched launched{.clock = clock, .access = {.agent = agent_of(stream), .epoch = epoch, .operation = name_operation(name)}};
  for (const Range& range : ranges) {
    if (range.write) continue;
    if (options().uninitialized) check_written(range, launched.access);
    check(range, launched);
  }
  for (const Range& range : ranges) {
    if (range.write) check(range, launched);
  }
  return launched;
}

Point point_of(c10::Stream stream) {
  const Lock lock;
  return {.clock = clock_of(stream), .capture = capture_of(stream)};
}

void stream_waits(c10::Stream stream, const Point& point) {
  const Lock lock;
  wait_within_capture(stream, point.capture);
  state().streams[agent_of(stream)].join(point.clock);
  ++stats_of(stream.device_index()).stream_waits;
}

void host_waits(int device, const Clock& clock, const std::string& reason) {
  std::function<void(const std::string&)> hook;
  {
    const Lock lock;
    wait_beside_captures(device, reason);
    hook = state().before_host_wait;
    ++stats_of(device).host_waits[reason];
  }
  if (hook) hook(reason);
  host_finds(clock);
}

void host_finds(const Clock& clock) {
  const Lock lock;
  host_learns(clock);
  pinned_memory().arrive(host_clock());
}

void synchronize(int device) {
  std::vector<Pending> pending;
  Clock all;
  {
    const Lock lock;
    pending.swap(state().pending[static_cast<std::size_t>(device)]);
    for (const Clock& stream : state().streams) all.join(stream);
  }
  for (const Pending& one : pending) {
    if (const auto owner = one.owner.lock()) one.complete();
  }
  host_waits(device, all, "device.synchronize");
}

void complete_at_synchronize(int device, std::weak_ptr<void> owner, std::function<void()> complete) {
  const Lock lock;
  auto& pending = state().pending[static_cast<std::size_t>(device)];
  std::erase_if(pending, [](const Pending& one) { return one.owner.expired(); });
  pending.push_back({std::move(owner), std::move(complete)});
}

AccessMap& accesses() { return state().accesses; }
void report(const std::string& text) { state().reports.push_back(text); }

std::size_t name_operation(const std::string& name) {
  static const char* const traced = std::getenv("SIM_TRACE");
  const auto number = state().operations.size();
  state().operations.push_back(name);
  if (traced != nullptr && std::to_string(number) == traced) {
    std::fprintf(stderr, "sim: operation %zu, '%s':\n%s\n", number, name.c_str(), c10::get_backtrace(2).c_str());
  }
  return number;
}

std::string describe(const Access& access) {
  const auto is_default = access.agent <= kDevices;
  return "'" + state().operations[access.operation] + "' (operation " + std::to_string(access.operation) + ", " +
         (is_default ? "default stream" : "stream " + std::to_string(access.agent)) + ")";
}

const Options& options() { return state().options; }
Stats& stats_of(int device) { return state().stats.at(static_cast<std::size_t>(device)); }

void add_ranges(std::vector<Range>& ranges, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  // From the innermost dimension outwards, as long as what is inside is dense.
  std::vector<std::size_t> dims;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.push_back(static_cast<std::size_t>(d));
  }
  std::sort(dims.begin(), dims.end(), [&](auto a, auto b) { return tensor.strides()[a] < tensor.strides()[b]; });
  std::int64_t dense = 1;
  std::size_t inner = 0;
  for (; inner < dims.size() && tensor.strides()[dims[inner]] == dense; ++inner) dense *= tensor.sizes()[dims[inner]];
  std::int64_t last = dense - 1;
  for (std::size_t k = inner; k < dims.size(); ++k) last += (tensor.sizes()[dims[k]] - 1) * tensor.strides()[dims[k]];

  constexpr std::int64_t kMostRanges = 64;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto itemsize = tensor.itemsize();
  const auto add = [&](std::int64_t first, std::int64_t numel) {
    const auto from = begin + static_cast<std::size_t>(first) * itemsize;
    ranges.push_back({.begin = from, .end = from + static_cast<std::size_t>(numel) * itemsize, .write = write});
  };
  if (inner + 1 == dims.size() && tensor.sizes()[dims[inner]] <= kMostRanges) {
    for (std::int64_t k = 0; k < tensor.sizes()[dims[inner]]; ++k) add(k * tensor.strides()[dims[inner]], dense);
  } else {
    add(0, last + 1);
  }
}

c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

void set_options(const Options& options) {
  const Lock lock;
  state().options = options;
}

std::vector<std::string> take_reports() {
  const Lock lock;
  return std::exchange(state().reports, {});
}

void before_host_wait(std::function<void(const std::string&)> hook) {
  const Lock lock;
  state().before_host_wait = std::move(hook);
}

std::int64_t Stats::all_kernels() const { return total(kernels); }
std::int64_t Stats::all_host_waits() const { return total(host_waits); }

Stats stats(int device) {
  const Lock lock;
  return stats_of(device);
}

void reset_stats(int device) {
  const Lock lock;
  Stats& stats = stats_of(device);
  const Stats before = std::exchange(stats, {});
  stats.allocated = stats.peak = before.allocated;
  stats.reserved = before.reserved;
}

void set_cost(const Cost& cost) {
  const Lock lock;
  state().cost = cost;
}

std::uint64_t now() {
  const Lock lock;
  return host_clock().time();
}

}  // namespace sim
