#include "train_gpt/run_folder.h"

#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iostream>

#include "train_gpt/config.h"

namespace fs = std::filesystem;

namespace {

// 20260102030405 at 03:04:05 on 2 January 2026: a number, which a mesh can exchange.
double local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::array<char, 32> digits{};
  std::strftime(digits.data(), digits.size(), "%Y%m%d%H%M%S", &parts);
  return std::stod(digits.data());
}

// runs/20260102-030405, or runs/20260102-030405-2 for the second that began then.
std::string name_of(double time, double number) {
  const auto digits = std::to_string(static_cast<std::int64_t>(time));
  const auto name = "runs/" + digits.substr(0, 8) + "-" + digits.substr(8);
  return number == 1 ? name : name + "-" + std::to_string(static_cast<int>(number));
}

// Every rank returns what rank 0 says.
double from_rank0(double value, const fsdp::DeviceMesh& mesh) { return mesh.sum(mesh.rank() == 0 ? value : 0.0); }

std::string new_folder(const fsdp::DeviceMesh& mesh) {
  const double time = from_rank0(local_time(), mesh);
  double number = 1;
  if (mesh.rank() == 0) {
    std::error_code error;  // A folder that cannot be made is found when the configuration is written.
    fs::create_directories("runs", error);
    while (!fs::create_directory(name_of(time, number), error) && !error) ++number;
  }
  return name_of(time, from_rank0(number, mesh));
}

}  // namespace

std::string checkpoints_of(const Options& options, const std::string& folder) {
  return options.save.empty() ? folder + "/checkpoints" : options.save;
}

RunFolder::RunFolder(const Options& options, const fsdp::DeviceMesh& mesh)
    : path_(options.run.empty() ? new_folder(mesh) : options.run),
      log_(options.log.empty() ? path_ + "/log.jsonl" : options.log),
      checkpoints_(checkpoints_of(options, path_)),
      checkpoint_name_(options.save_name) {
  std::string failure;
  if (mesh.rank() == 0) {
    try {
      fs::create_directories(path_);
      fs::create_directories(checkpoints_);
      write_config(path_, options);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  if (!mesh.all(failure.empty())) throw UsageError("cannot make the folder of the run: " + failure);
}

std::optional<RunFolder> open_run(const Options& options, const fsdp::DeviceMesh& mesh) {
  try {
    validate_ranks(options, mesh.size());
    return RunFolder(options, mesh);
  } catch (const UsageError& error) {
    if (mesh.rank() == 0) std::cerr << "train_gpt: " << error.what() << std::endl;
    mesh.barrier();  // A launcher that sees a rank end may stop the others before rank 0 has spoken.
    return std::nullopt;
  }
}
