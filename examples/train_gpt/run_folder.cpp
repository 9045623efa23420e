#include "train_gpt/run_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
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

std::string read_line(int fd) {
  std::array<char, 256> text{};
  const auto length = pread(fd, text.data(), text.size(), 0);
  return {text.data(), length > 0 ? static_cast<std::size_t>(length) : 0};
}

std::string who_am_i() {
  std::array<char, 128> host{};
  gethostname(host.data(), host.size() - 1);
  return "process " + std::to_string(getpid()) + " on " + host.data();
}

}  // namespace

RunLock::RunLock(const std::string& folder, int kind) : fd_(open((folder + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  require(fd_ >= 0, "cannot write in " + folder + ": " + std::strerror(errno));
  if (flock(fd_, kind | LOCK_NB) != 0) {
    const int why = errno;
    const auto holder = read_line(fd_);
    close(fd_);
    require(why != EWOULDBLOCK, "another training goes on in " + folder + " (" + holder + "): wait for its end, or end it");
    fd_ = -1;
    std::cerr << "train_gpt: the file system can't lock " << folder << "/.lock (" << std::strerror(why)
              << "): start no other training there" << std::endl;
    return;
  }
}

RunLock::~RunLock() {
  if (fd_ >= 0) close(fd_);
}

void RunLock::sign() const {
  const auto own = who_am_i();
  if (fd_ < 0 || ftruncate(fd_, 0) != 0) return;
  [[maybe_unused]] const auto written = pwrite(fd_, own.data(), own.size(), 0);
}

std::string checkpoints_of(const Options& options, const std::string& folder) {
  return options.save.empty() ? folder + "/checkpoints" : options.save;
}

void check_folder(const Options& options) {
  if (options.run.empty()) return;
  require(has_config(options.run) || !fs::exists(options.run + "/config.json"),
          "--run " + options.run + " can't be the folder of a run: it has a config.json that is not of a run");
  if (fs::exists(options.run + "/.lock")) RunLock(options.run, LOCK_SH);
  auto above = fs::absolute(options.run);
  while (!fs::exists(above)) above = above.parent_path();
  require(fs::is_directory(above), "cannot make the folder of the run: " + above.string() + " is not a folder");
}

RunFolder::RunFolder(const Options& options, const fsdp::DeviceMesh& mesh) : checkpoint_name_(options.save_name) {
  name(options, options.run);
  if (mesh.rank() == 0 && has_config(path_)) lock_.emplace(path_).sign();
}

void RunFolder::name(const Options& options, std::string path) {
  path_ = std::move(path);
  log_ = options.log.empty() ? path_ + "/log.jsonl" : options.log;
  checkpoints_ = checkpoints_of(options, path_);
}

void RunFolder::begin(const Options& options, const fsdp::DeviceMesh& mesh) {
  if (path_.empty()) name(options, new_folder(mesh));
  if (mesh.rank() != 0) return;
  try {
    fs::create_directories(path_);
    if (!lock_) {
      lock_.emplace(path_).sign();
      require(!has_config(path_), "--run " + path_ + " holds a run, which another process has begun meanwhile: choose another folder");
    }
    fs::create_directories(checkpoints_);
    write_config(path_, options);
  } catch (const fs::filesystem_error& error) {
    throw UsageError(std::string("cannot make the folder of the run: ") + error.what());
  }
}

bool nobody_refuses(const fsdp::DeviceMesh& mesh, const std::string& error) {
  const bool rank0_speaks = mesh.sum(mesh.rank() == 0 && !error.empty() ? 1 : 0) > 0;
  if (!error.empty() && (mesh.rank() == 0 || !rank0_speaks)) std::cerr << "train_gpt: " << error << std::endl;
  if (mesh.all(error.empty())) return true;
  mesh.barrier();  // A launcher that sees a rank end may stop the others before that one has spoken.
  return false;
}
