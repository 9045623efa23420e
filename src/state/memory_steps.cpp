#include "state/memory_steps.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <tuple>
#include <variant>

#include "base/text.h"
#include "checkpoint/checked_files.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/memory_folder.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "state/snapshot.h"
#include "state/streams.h"
#include "state/texts.h"

namespace fsdp::state {
namespace {

namespace fs = std::filesystem;

using ckpt::RecordLocation;

constexpr const char* kNotFound = "the steps in memory could not be examined:";
/// Records that are fetched before a load knows which it needs: counts of updates, states of random generators.
constexpr std::int64_t kSmallRecord = 16 << 10;

const std::string kSidecarName(ckpt::kSidecar);
const std::string kMetadataName(ckpt::kMetadataFile);

/// Describes the step of this name in this host's folder: name, number, and each file with its size that is there.
std::string describe_step(const fs::path& step) {
  const auto sidecar = ckpt::read_sidecar(step);
  const auto size_of = [&](const std::string& file) -> std::optional<std::int64_t> {
    struct stat status {};
    if (ckpt::FileSystem::current().stat((step / file).c_str(), &status) == 0) return status.st_size;
    if (errno != ENOENT) ckpt::throw_errno("look at", step / file);
    return std::nullopt;
  };
  std::vector<std::string> fields = {step.filename(), std::to_string(sidecar.saved), kSidecarName,
                                     std::to_string(size_of(kSidecarName).value_or(0)), "1"};
  for (const auto& file : sidecar.files) {
    fields.insert(fields.end(), {file.name, std::to_string(file.size), size_of(file.name) == file.size ? "1" : "0"});
  }
  fields.emplace_back();
  return fields_of(fields);
}

}  // namespace

Hosts Hosts::find(const std::string& folder, const CheckpointRanks& ranks) {
  std::string place;
  ranks.together(kNotFound, [&] { place = ckpt::place_of(folder); });
  Hosts hosts;
  std::map<std::string, std::size_t> number;
  const auto places = ranks.gather_everywhere(place, "checkpoint: which ranks share a host");
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const auto [found, is_new] = number.emplace(places[rank], hosts.ranks.size());
    if (is_new) hosts.ranks.emplace_back();
    hosts.of_rank.push_back(found->second);
    hosts.ranks[found->second].push_back(static_cast<std::int64_t>(rank));
  }
  return hosts;
}

bool MemoryStep::is_on(std::size_t host, const std::string& file) const {
  const auto& holders = files.at(file).hosts;
  return std::find(holders.begin(), holders.end(), host) != holders.end();
}

std::string MemoryStep::missing() const {
  std::vector<std::string> names;
  for (const auto& [file_name, file] : files) {
    if (file.hosts.empty()) names.push_back(file_name);
  }
  return joined(names, ", ");
}

MemorySteps MemorySteps::find(const std::string& folder, const Hosts& hosts, const CheckpointRanks& ranks) {
  std::string text, faults;
  ranks.together(kNotFound, [&] {
    if (!hosts.leads(ranks) || !ckpt::is_there(folder)) return;
    for (const auto& entry : ckpt::list_folder(folder)) {
      if (entry.starts_with('.')) continue;
      try {
        text += describe_step(fs::path(folder) / entry);
      } catch (const ckpt::DamageError& error) {
        faults += fields_of({error.what()});
      } catch (const ckpt::SystemError& error) {
        if (!error.is_missing()) throw;  // else a save or a removal did not end
      }
    }
  });
  std::map<std::pair<std::int64_t, std::string>, MemoryStep> found;
  MemorySteps all;
  const auto texts = ranks.gather_everywhere(text + '\0' + faults, "checkpoint: steps in the memory of hosts");
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    Fields fields(texts[rank]);
    for (auto name = fields.next(); !name.empty(); name = fields.next()) {
      const auto saved = std::stoll(fields.next());
      auto& step = found[{saved, name}];
      step.name = name;
      step.saved = saved;
      for (auto file = fields.next(); !file.empty(); file = fields.next()) {
        auto& entry = step.files[file];
        entry.size = std::stoll(fields.next());
        if (fields.next() == "1") entry.hosts.push_back(hosts.of_rank[rank]);
      }
    }
    while (!fields.at_end()) all.faults.push_back(fields.next());
  }
  for (auto step = found.rbegin(); step != found.rend(); ++step) all.steps.push_back(std::move(step->second));
  return all;
}

std::vector<std::string> drop_damaged(MemoryStep& step, const std::string& folder, const Hosts& hosts, const CheckpointRanks& ranks) {
  std::string text;
  const auto path = fs::path(folder) / step.name;
  if (hosts.leads(ranks) && step.is_on(hosts.own(ranks), kSidecarName)) {
    try {
      for (const auto& entry : ckpt::read_sidecar(path).files) {
        if (!step.is_on(hosts.own(ranks), entry.name)) continue;
        if (const auto fault = ckpt::fault_in(path, entry); !fault.empty()) text += fields_of({entry.name, path.string() + ": " + fault});
      }
    } catch (const Error& error) {
      text += fields_of({kSidecarName, error.what()});
    }
  }
  std::vector<std::string> faults;
  const auto texts = ranks.gather_everywhere(text, "checkpoint: damage in the memory of hosts");
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (Fields fields(texts[rank]); !fields.at_end();) {
      std::erase(step.files.at(fields.next()).hosts, hosts.of_rank[rank]);
      faults.push_back(fields.next());
    }
  }
  return faults;
}

HeldStep::HeldStep(std::string folder, const MemoryStep& step, const Hosts& hosts, const CheckpointRanks& ranks)
    : folder_(std::move(folder)), step_(step), hosts_(hosts), ranks_(ranks) {}

HeldStep::~HeldStep() {
  if (received_) received_->discard();
}

bool HeldStep::is_elsewhere(const std::string& file) const { return step_.files.contains(file) && !step_.is_on(hosts_.own(ranks_), file); }

fs::path HeldStep::path_of(const std::string& file) const {
  return is_elsewhere(file) && received_ ? received_->path() / file : fs::path(path()) / file;
}

std::string HeldStep::origin() const {
  const std::string own = "memory of this host";
  return received_bytes_ == 0 ? own : own + ", and " + std::to_string(received_bytes_) + " bytes from that of other hosts";
}

void HeldStep::open() {
  fetch({{kSidecarName, 0, step_.files.at(kSidecarName).size}, {kMetadataName, 0, step_.files.at(kMetadataName).size}});
  std::vector<RecordLocation> small;
  ranks_.together(kNotFound, [&] {
    ckpt::CheckedFiles files([this](const std::string& file) { return path_of(file); });
    const auto text = files.read_whole(kMetadataName, ckpt::kMostMetadata);
    for (const auto& item : ckpt::read_dcp_metadata(text, path_of(kMetadataName).string()).items) {
      if (const auto* object = std::get_if<ckpt::DcpObject>(&item.content)) small.push_back(object->record);
      const auto* tensor = std::get_if<ckpt::DcpTensor>(&item.content);
      if (tensor == nullptr) continue;
      const bool is_state =
          (item.name.starts_with(kModel) || item.name.starts_with(kOptimizer)) && item.name.find("._extra_state") == std::string::npos;
      for (const auto& chunk : tensor->chunks) {
        if (!is_state || chunk.record.length <= kSmallRecord) small.push_back(chunk.record);
      }
    }
  });
  fetch(small);
}

/// The blocks that contain these bytes, as ranges, if neither this host holds them nor an earlier call has asked for them.
std::vector<RecordLocation> HeldStep::missing_blocks(const std::vector<RecordLocation>& needed) {
  std::set<std::pair<std::string, std::int64_t>> blocks;
  for (const auto& [file, offset, length] : needed) {
    if (!is_elsewhere(file)) continue;
    for (auto block = offset / ckpt::kSummedBlock; block * ckpt::kSummedBlock < offset + length; ++block) {
      if (asked_.emplace(file, block).second) blocks.emplace(file, block);
    }
  }
  std::vector<RecordLocation> missing;
  for (const auto& [file, block] : blocks) {
    const auto begin = block * ckpt::kSummedBlock;
    const auto length = std::min(ckpt::kSummedBlock, step_.files.at(file).size - begin);
    if (!missing.empty() && missing.back().file == file && missing.back().offset + missing.back().length == begin) {
      missing.back().length += length;
    } else {
      missing.push_back({file, begin, length});
    }
  }
  return missing;
}

/// Writes bytes that another host has sent. The other blocks of the file stay holes, which take no memory and are not read.
void HeldStep::receive(const std::string& file, std::int64_t offset, std::span<const char> data) {
  if (!received_) received_ = ckpt::begin_step(path());
  const auto place = received_->path() / file;
  if (!ckpt::is_there(place)) {
    auto created = ckpt::File::create(place);
    if (const auto size = step_.files.at(file).size; size > 0) created.write_at(size - 1, std::string(1, '\0'));
    created.close();
  }
  auto opened = ckpt::File::open_to_write(place);
  opened.write_at(offset, data);
  opened.close();
  received_bytes_ += static_cast<std::int64_t>(data.size());
}

void HeldStep::fetch(const std::vector<RecordLocation>& needed) {
  const auto is_everywhere = [&](const auto& file) { return file.second.hosts.size() == hosts_.ranks.size(); };
  if (std::all_of(step_.files.begin(), step_.files.end(), is_everywhere)) return;
  std::string text;
  for (const auto& [file, offset, length] : missing_blocks(needed))
    text += fields_of({file, std::to_string(offset), std::to_string(length)});
  // What each pair of ranks sends, in the order of the pairs.
  std::map<comm::RankPair, std::vector<RecordLocation>> sent;
  const auto texts = ranks_.gather_everywhere(text, "checkpoint: what ranks need of other hosts");
  for (std::int64_t receiver = 0; receiver < ranks_.size(); ++receiver) {
    for (Fields fields(texts[static_cast<std::size_t>(receiver)]); !fields.at_end();) {
      RecordLocation range{.file = fields.next()};
      range.offset = std::stoll(fields.next());
      range.length = std::stoll(fields.next());
      const auto& of_host = hosts_.ranks[step_.files.at(range.file).hosts.front()];
      const auto sender = of_host[static_cast<std::size_t>(receiver) % of_host.size()];
      sent[{sender, receiver}].push_back(std::move(range));
    }
  }
  if (sent.empty()) return;
  std::vector<comm::RankPair> pairs;
  std::vector<Stream> streams;
  for (const auto& [pair, ranges] : sent) {
    pairs.push_back(pair);
    const bool sends = pair.first == ranks_.index();
    if (!sends && pair.second != ranks_.index()) continue;
    auto& stream = streams.emplace_back();
    for (const auto& range : ranges) stream.bytes += range.length;
    stream.move = [this, sends, &ranges = ranges](std::int64_t offset, std::span<char> data) {
      for (const auto& range : ranges) {
        if (offset < range.length && !data.empty()) {
          const auto part = data.first(std::min(data.size(), static_cast<std::size_t>(range.length - offset)));
          if (sends) {
            ckpt::File::open(path_of(range.file)).read_at(range.offset + offset, part);
          } else {
            receive(range.file, range.offset + offset, part);
          }
          data = data.subspan(part.size());
          offset = range.length;
        }
        offset -= range.length;
      }
    };
  }
  const auto connected = ranks_.connect(pairs);
  ranks_.together("nothing was loaded, as parts could not be sent between hosts:", [&] { run_streams(connected, streams); });
}

}  // namespace fsdp::state
