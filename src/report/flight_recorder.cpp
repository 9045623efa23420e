#include "report/flight_recorder.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "checkpoint/output_file.h"
#include "checkpoint/pickle.h"
#include "events/row_name.h"

namespace fsdp::report {
namespace {

constexpr std::string_view kVersion = "2.10";

/// The analyser's name for an operation. What this library exchanges beside tensors, each rank gets from all.
std::string_view name_of_operation(const std::string& operation) {
  if (operation == "barrier") return "barrier";
  if (operation.find("reduce-scatter") != std::string::npos) return "reduce_scatter";
  if (operation.find("all-gather") != std::string::npos) return "all_gather";
  if (operation.find("broadcast") != std::string::npos) return "broadcast";
  return operation == "scatter" ? "scatter" : "all_gather";
}

/// One rank's file.
class Dump {
 public:
  /// `first`: by row, the first number that all have kept.
  Dump(const RankNow& rank, const std::map<std::string, std::uint64_t>& first) : rank_(rank) {
    for (const auto& [row, of_row] : rank.rows()) {
      for (const auto* call : rank.calls(row)) {
        if (call->call.number >= first.at(row)) calls_.push_back({.row = &row, .call = call});
      }
    }
    std::stable_sort(calls_.begin(), calls_.end(), [](const Made& a, const Made& b) { return a.call->posted < b.call->posted; });
  }

  std::string text() {
    pickle_.begin_dict();
    pickle_.string("version");
    pickle_.string(kVersion);
    pickle_.string("pg_config");
    pickle_.begin_dict();
    for (const auto& [row, of_row] : rank_.rows()) write_row(row);
    pickle_.end_dict();
    pickle_.string("pg_status");
    pickle_.begin_dict();
    pickle_.end_dict();
    pickle_.string("entries");
    pickle_.begin_list();
    for (std::size_t i = 0; i < calls_.size(); ++i) write_call(static_cast<std::int64_t>(i), *calls_[i].row, *calls_[i].call);
    pickle_.end_list();
    pickle_.end_dict();
    return pickle_.finish();
  }

 private:
  struct Made {
    const std::string* row;
    const Collective* call;
  };

  void member(std::string_view name, std::int64_t value) {
    pickle_.string(name);
    pickle_.integer(value);
  }
  void member(std::string_view name, std::string_view value) {
    pickle_.string(name);
    pickle_.string(value);
  }
  void member(std::string_view name, bool value) {
    pickle_.string(name);
    pickle_.boolean(value);
  }
  void list_of(std::string_view name, std::string_view value) {
    pickle_.string(name);
    pickle_.begin_list();
    pickle_.string(value);
    pickle_.end_list();
  }
  void sizes(std::string_view name, std::int64_t bytes) {
    pickle_.string(name);
    pickle_.begin_list();
    pickle_.begin_list();
    pickle_.integer(bytes);
    pickle_.end_list();
    pickle_.end_list();
  }

  static std::string dimension_of(const std::string& row) { return row.substr(0, row.find(' ')); }

  void write_row(const std::string& row) {
    std::string ranks;
    for (const auto rank : events::ranks_of_row(row)) ranks += (ranks.empty() ? "[" : ", ") + std::to_string(rank);
    pickle_.string(row);
    pickle_.begin_dict();
    member("name", row);
    member("desc", dimension_of(row));
    member("ranks", ranks + "]");
    pickle_.end_dict();
  }

  void write_call(std::int64_t record, const std::string& row, const Collective& collective) {
    const auto& call = collective.call;
    const std::string operation(rank_.text_of(call.operation));
    const auto name = name_of_operation(operation);
    std::string unit(rank_.text_of(call.unit));
    std::replace_if(
        unit.begin(), unit.end(), [](char c) { return c == ':' || c == ' '; }, '_');
    const auto ranks = static_cast<std::int64_t>(events::ranks_of_row(row).size());
    pickle_.begin_dict();
    member("record_id", record);
    member("pg_id", std::int64_t{0});
    pickle_.string("process_group");
    pickle_.begin_tuple();
    pickle_.string(row);
    pickle_.string(dimension_of(row));
    pickle_.end_tuple();
    member("collective_seq_id", static_cast<std::int64_t>(call.number));
    member("p2p_seq_id", std::int64_t{0});
    member("op_id", static_cast<std::int64_t>(call.number));
    member("profiling_name", std::string("gloo:").append(name) + (unit.empty() ? "" : " " + unit));
    member("time_created_ns", collective.posted + rank_.left.writer.ahead_of_epoch);
    sizes("input_sizes", name == "reduce_scatter" ? call.bytes * ranks : call.bytes);
    sizes("output_sizes", name == "all_gather" ? call.bytes * ranks : call.bytes);
    const auto kind = unit.empty() ? operation : operation + " of " + unit;
    list_of("input_dtypes", kind);
    list_of("output_dtypes", kind);
    member("state", std::string_view(collective.is_done() ? "completed" : collective.is_awaited() ? "started" : "scheduled"));
    member("is_p2p", false);
    member("retired", collective.is_done());
    pickle_.string("frames");
    pickle_.begin_list();
    pickle_.end_list();
    pickle_.end_dict();
  }

  const RankNow& rank_;
  std::vector<Made> calls_;
  ckpt::PickleWriter pickle_;
};

}  // namespace

void write_flight_recorder(const std::vector<RankNow>& ranks, const std::filesystem::path& folder) {
  std::map<std::string, std::uint64_t> first;
  for (const auto& rank : ranks) {
    for (const auto& [row, of_row] : rank.rows()) {
      auto& number = first[row];
      if (const auto calls = rank.calls(row); !calls.empty()) number = std::max(number, calls.front()->call.number);
    }
  }
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  for (const auto& rank : ranks) {
    ckpt::write_output(folder / ("rank_" + std::to_string(rank.rank())), Dump(rank, first).text());
  }
}

}  // namespace fsdp::report
