#pragma once

#include <functional>
#include <vector>

namespace fsdp {

/// Work of the host beside each replay of a graph.
struct BesideReplay {
  std::function<void()> before;  ///< Throws if the graph no longer does what the host expects.
  std::function<void()> after;   ///< Counts, for example.
};

/// Adds work to each replay of the step that this thread captures. Without a capture that requests it, this does nothing.
void beside_each_replay(BesideReplay actions);

/// Whether this thread captures a step whose replays request such work: the step is not computed now.
bool is_asked_for_replays();

/// While it exists, the arguments of beside_each_replay() on this thread are added to the list.
class ReplayList {
 public:
  explicit ReplayList(std::vector<BesideReplay>& actions);
  ~ReplayList();
  ReplayList(const ReplayList&) = delete;
  ReplayList& operator=(const ReplayList&) = delete;

 private:
  std::vector<BesideReplay>* const before_;
};

}  // namespace fsdp
