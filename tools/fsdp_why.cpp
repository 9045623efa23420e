// fsdp why: why the ranks of a run wait, or have ended.

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "checkpoint/printable.h"
#include "report/event_files.h"
#include "report/flight_recorder.h"
#include "report/why.h"
#include "subcommands.h"

namespace fsdp::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kReadEvents = 4096;  // A rank that waits, or has stopped, writes no more of them.

int why(const fs::path& folder, const fs::path& flight_recorder) {
  auto run = report::read_run(folder, kReadEvents);
  const auto ranks = report::ranks_of(std::move(run.ranks));
  const auto why = report::explain(ranks);
  if (!flight_recorder.empty()) report::write_flight_recorder(ranks, flight_recorder);
  std::cout << ckpt::printable(why.text) << "\n";
  for (const auto& line : run.left_out) std::cout << "Not read: " << ckpt::printable_line(line) << "\n";
  return why.cause == report::Cause::kNothing || why.cause == report::Cause::kSlow ? 0 : kFound;
}

}  // namespace

std::function<int()> add_why(CLI::App& command) {
  auto folder = std::make_shared<std::string>();
  auto flight_recorder = std::make_shared<std::string>();
  command.add_option("folder", *folder, "The value of FSDP_EVENTS with which the ranks were started")->required();
  command.add_option(
      "--flight-recorder", *flight_recorder,
      "A folder to which the ranks' calls are written in c10d's format, for python -m torch.distributed.flight_recorder.fr_trace FOLDER");
  return [=] { return why(*folder, *flight_recorder); };
}

}  // namespace fsdp::tools
