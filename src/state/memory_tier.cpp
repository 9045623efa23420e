#include "state/memory_tier.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_file.h"
#include "checkpoint/printable.h"
#include "fsdp/error.h"
#include "state/rank_file.h"
#include "state/streams.h"
#include "state/texts.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

void check_name(const std::string& name) {
  if (!name.empty() && name.front() != '.' && name.find('/') == std::string::npos) return;
  throw Error("'" + ckpt::printable(name) + "' is no name for a step in memory; give one such as step-100, which is not a path");
}

/// Which ranks send their files, and to which: to the rank of the same place on the host that is `distance` hosts further on.
std::vector<comm::RankPair> copies_between(const Hosts& hosts, int distance) {
  const auto count = hosts.ranks.size();
  std::vector<comm::RankPair> copies;
  if (count == 1) return copies;
  if (distance < 1 || static_cast<std::size_t>(distance) % count == 0) {
    throw Error("distance is " + std::to_string(distance) + ", and there are " + std::to_string(count) +
                " hosts with memory of their own: copies must be sent to another host, so give a number from 1 to " +
                std::to_string(count - 1));
  }
  for (std::size_t host = 0; host < count; ++host) {
    const auto& to = hosts.ranks[(host + static_cast<std::size_t>(distance)) % count];
    for (std::size_t i = 0; i < hosts.ranks[host].size(); ++i) copies.emplace_back(hosts.ranks[host][i], to[i % to.size()]);
  }
  std::sort(copies.begin(), copies.end());
  return copies;
}

}  // namespace

MemoryTier::MemoryTier(const CheckpointRanks& ranks, const std::string& folder, int distance) : ranks_(ranks), path_(folder) {
  constexpr const char* kUnusable = "checkpoints can't be saved in memory:";
  ranks_.together(kUnusable, [&] {
    if (path_.empty()) throw Error("memory is empty on this rank, and not on others; give a folder in tmpfs on all ranks");
    ckpt::make_folders(path_);
  });
  hosts_ = Hosts::find(path_, ranks_);
  ranks_.together(kUnusable, [&] {
    copies_ = copies_between(hosts_, distance);
    if (leads()) folder_.emplace(path_);
  });
  bool is_committed = false;  // on all hosts
  for (const auto& step : MemorySteps::find(path_, hosts_, ranks_).steps) {
    ckpt::note_saved(step.saved);
    if (is_committed || !step.missing().empty()) continue;
    kept_.push_back(step.name);
    is_committed = step.files.at(std::string(ckpt::kSidecar)).hosts.size() == hosts_.ranks.size();
  }
  pairs_ = ranks_.connect(copies_);
}

void MemoryTier::copy(const std::string& step, std::int64_t own_bytes) {
  const auto sizes = ranks_.gather_everywhere(std::to_string(own_bytes), "checkpoint: sizes of files in memory");
  std::vector<Stream> streams;
  std::vector<ckpt::File> files;
  files.reserve(pairs_.size());
  ranks_.together("a step in memory could not be copied between hosts:", [&] {
    for (const auto& [sender, receiver] : copies_) {
      const bool sends = sender == ranks_.index();
      if (!sends && receiver != ranks_.index()) continue;
      const auto place = fs::path(step) / name_of_file(sender);
      files.push_back(sends ? ckpt::File::open(place) : ckpt::File::create(place));
      streams.push_back({.bytes = std::stoll(sizes[static_cast<std::size_t>(sender)]),
                         .move = [sends, &file = files.back()](std::int64_t offset, std::span<char> data) {
                           sends ? file.read_at(offset, data) : file.write_at(offset, data);
                         }});
    }
  });
  ranks_.together("a step in memory could not be copied between hosts:", [&] {
    run_streams(pairs_, streams);
    for (auto& file : files) file.close();
  });
}

void MemoryTier::write(const std::string& name, const Snapshot& snapshot, std::int64_t saved, Phases& phases) {
  const std::string what = "the step " + name + " could not be saved in memory:";
  std::optional<ckpt::TemporaryStep> step;
  const auto target = fs::path(path_) / name;
  try {
    ranks_.together(what, [&] {
      check_name(name);
      if (!leads()) return;
      folder_->keep_only(kept_);
      step = ckpt::begin_step(target);
    });
    std::string own_folder;
    const auto told = ranks_.gather_everywhere(fields_of({name, step ? step->path().string() : ""}), "checkpoint: its folders in memory");
    RankFile written;
    ranks_.together(what, [&] {
      if (Fields(told.front()).next() != name) {
        throw Error("was called with the name " + ckpt::printable(name) + ", and rank 0 with another one; give the same on all ranks");
      }
      Fields of_leader(told[static_cast<std::size_t>(hosts_.ranks[hosts_.own(ranks_)].front())]);
      of_leader.next();
      own_folder = of_leader.next();
      written = write_records(own_folder, snapshot, ranks_.index());
    });
    if (!copies_.empty()) copy(own_folder, written.listed.size);
    phases.end(Phase::kWrite, written.listed.size);
    const auto texts = ranks_.gather(written.text, "checkpoint: list of what ranks wrote");
    std::string text;
    ranks_.together(what, [&] {
      if (ranks_.index() != 0) return;
      const auto [metadata, listed] = join_files(texts);
      text = std::to_string(saved) + '\0';
      for (const auto& file : listed) text += ckpt::line_of(file) + '\0';
      text += '\0' + metadata;
    });
    text = ranks_.broadcast(text, "checkpoint: what ranks wrote");
    ranks_.together(what, [&] {
      if (!leads()) return;
      Fields fields(text);
      const auto number = std::stoll(fields.next());
      std::vector<ckpt::ListedFile> listed;
      for (auto line = fields.next(); !line.empty(); line = fields.next()) listed.push_back(ckpt::listed_in(line));
      ckpt::seal_dcp(own_folder, std::string(fields.rest()), std::move(listed), ckpt::FileSystem::current(), number);
      const auto replaced = ckpt::commit_step(own_folder, target);
      if (!replaced.empty()) ckpt::remove_tree(replaced);
    });
  } catch (...) {
    if (step) step->discard();
    throw;
  }
  kept_ = {name};
  phases.end(Phase::kCommit, 0);
}

void MemoryTier::remove() {
  ranks_.together("steps in memory could not be removed:", [&] {
    if (!leads()) return;
    folder_.reset();
    ckpt::MemoryFolder::remove(path_);
  });
}

}  // namespace fsdp::state
