#include "state/ranks.h"

#include <ATen/ATen.h>

#include <cstring>
#include <set>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/printable.h"
#include "fsdp/error.h"

namespace fsdp::state {
namespace {

comm::Label label_of(const char* operation) { return {.operation = operation, .unit = {}}; }

std::vector<std::shared_ptr<comm::Communicator>> rows_of(const DeviceMesh& mesh, CheckpointRanks::Groups groups) {
  std::vector<std::shared_ptr<comm::Communicator>> rows;
  if (!mesh.defined()) return rows;
  for (const auto& dim : mesh.dims()) {
    rows.push_back(groups == CheckpointRanks::Groups::kOwn ? mesh.new_communicator(dim.name) : mesh.communicator(dim.name));
  }
  return rows;
}

std::vector<std::shared_ptr<comm::Communicator>> rows_of(const engine::Engine& engine, CheckpointRanks::Groups groups) {
  auto rows = rows_of(engine.options().tensor_parallel, groups);
  for (auto& row : rows_of(engine.options().mesh, groups)) rows.push_back(std::move(row));
  return rows;
}

/// The first letter of the text of a failure.
constexpr char kDamage = 'd';
constexpr char kOther = 'o';

std::string text_of(const std::exception_ptr& failure) {
  if (!failure) return {};
  try {
    std::rethrow_exception(failure);
  } catch (const ckpt::DamageError& error) {
    return kDamage + std::string(error.what());
  } catch (const std::exception& error) {
    return kOther + (*error.what() == '\0' ? std::string("unknown error") : error.what());
  }
}

}  // namespace

CheckpointRanks::CheckpointRanks(DeviceMesh mesh, std::vector<std::shared_ptr<comm::Communicator>> rows)
    : mesh_(std::move(mesh)), rows_(std::move(rows)), ranks_(rows_) {}

CheckpointRanks::CheckpointRanks(const engine::Engine& engine, Groups groups)
    : CheckpointRanks(engine.options().mesh, rows_of(engine, groups)) {}

CheckpointRanks::CheckpointRanks(const DeviceMesh& mesh) : CheckpointRanks(mesh, rows_of(mesh, Groups::kOfMesh)) {}

std::vector<std::shared_ptr<comm::Communicator>> CheckpointRanks::connect(const std::vector<comm::RankPair>& pairs) const {
  return comm::connect_pairs(mesh_, rows_, pairs);
}

bool CheckpointRanks::all(bool ok, const char* operation) const { return ranks_.agree(ok, label_of(operation)); }

std::string CheckpointRanks::broadcast(const std::string& text, const char* operation) const {
  return ranks_.broadcast(text, label_of(operation));
}

std::vector<std::string> CheckpointRanks::gather(const std::string& mine, const char* operation) const {
  return ranks_.gather(mine, label_of(operation));
}

std::vector<std::string> CheckpointRanks::gather_everywhere(const std::string& mine, const char* operation) const {
  const auto label = label_of(operation);
  const auto lengths = ranks_.exchange(at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong), label);
  const auto longest = lengths.max().item<std::int64_t>();
  std::vector<std::string> all(static_cast<std::size_t>(size()));
  if (longest == 0) return all;
  const auto padded = at::zeros({longest}, at::kByte);
  std::memcpy(padded.data_ptr(), mine.data(), mine.size());
  const auto texts = ranks_.exchange(padded, label);
  for (std::int64_t rank = 0; rank < size(); ++rank) {
    all[static_cast<std::size_t>(rank)].assign(reinterpret_cast<const char*>(texts.const_data_ptr<std::uint8_t>()) + rank * longest,
                                               static_cast<std::size_t>(lengths.const_data_ptr<std::int64_t>()[rank]));
  }
  return all;
}

void CheckpointRanks::together(const std::string& what, const std::function<void()>& work) const {
  std::exception_ptr failure;
  try {
    work();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  agree(failure, what);
}

void CheckpointRanks::agree(const std::exception_ptr& failure, const std::string& what) const {
  std::string own = text_of(failure);
  if (!own.empty()) own = std::to_string(mesh_.rank()) + '\0' + own;
  std::string text;
  bool is_damage = true;
  std::set<std::string> listed;  // A failure that several ranks report is listed for the first of them only.
  for (const auto& of_rank : gather_everywhere(own, "checkpoint: agreement on its success")) {
    if (of_rank.empty()) continue;
    const auto end = of_rank.find('\0');
    const auto message = of_rank.substr(end + 1);
    is_damage = is_damage && message.front() == kDamage;
    if (!listed.insert(message).second) continue;
    text += "\n  rank " + of_rank.substr(0, end) + ": " + ckpt::printable(message.substr(1));  // with names from files, perhaps
  }
  if (text.empty()) return;
  if (is_damage) throw ckpt::DamageError(what + text);
  throw Error(what + text);
}

}  // namespace fsdp::state
