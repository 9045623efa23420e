#include "comm/host_memory/hosts.h"

#include <ATen/ops/zeros.h>

#include <fstream>
#include <stdexcept>
#include <utility>

#include "base/exception_text.h"

namespace fsdp::comm {
namespace {

constexpr int kBoot = 0x20000004;  // a tag of messages, beside those in call.h and shared_row.cpp

}  // namespace

std::vector<std::string> exchange_bytes(int rank, std::span<const std::int64_t> global_ranks, c10d::Backend& gloo, int tag,
                                        const std::string& mine) {
  const auto size = static_cast<int>(global_ranks.size());
  std::vector<at::Tensor> buffers;
  std::vector<std::pair<c10::intrusive_ptr<c10d::Work>, int>> works;
  for (int peer = 0; peer < size; ++peer) {
    buffers.push_back(at::zeros({static_cast<std::int64_t>(mine.size())}, at::kByte));
    std::vector<at::Tensor> argument = {buffers.back()};
    if (peer != rank) works.emplace_back(gloo.recv(argument, peer, tag), peer);
  }
  std::memcpy(buffers[static_cast<std::size_t>(rank)].mutable_data_ptr(), mine.data(), mine.size());
  std::vector<at::Tensor> argument = {buffers[static_cast<std::size_t>(rank)]};
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) works.emplace_back(gloo.send(argument, peer, tag), peer);
  }
  for (const auto& [work, peer] : works) {
    try {
      work->wait();
    } catch (...) {
      throw std::runtime_error(current_exception_text() + " (rank " + std::to_string(global_ranks[static_cast<std::size_t>(peer)]) + ")");
    }
  }
  std::vector<std::string> all;
  for (const at::Tensor& buffer : buffers) all.emplace_back(static_cast<const char*>(buffer.const_data_ptr()), mine.size());
  return all;
}

Boot Boot::of_this_host() {
  Boot boot;
  std::ifstream("/proc/sys/kernel/random/boot_id").read(boot.id, sizeof(boot.id) - 1);
  return boot;
}

int ranks_per_host(std::span<const Boot> hosts) {
  std::size_t ranks = 0;  // the number of ranks of the first host
  while (ranks < hosts.size() && hosts[ranks] == hosts[0]) ++ranks;
  if (ranks == 0 || hosts.size() % ranks != 0) return 1;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (!hosts[i].is_known() || !(hosts[i] == hosts[i / ranks * ranks])) return 1;
    for (std::size_t other = 0; other < i / ranks * ranks; other += ranks) {
      if (hosts[i] == hosts[other]) return 1;
    }
  }
  return static_cast<int>(ranks);
}

int ranks_per_host(int rank, std::span<const std::int64_t> global_ranks, c10d::Backend& gloo) {
  return ranks_per_host(exchange_records(rank, global_ranks, gloo, kBoot, Boot::of_this_host()));
}

}  // namespace fsdp::comm
