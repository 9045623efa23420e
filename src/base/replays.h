#pragma once

#include <functional>
#include <vector>

namespace fsdp {

/// What the host does beside each replay of a graph.
struct BesideReplay {
  std::function<void()> before;  ///< Throws if the graph would do something else than the host expects by now.
  std::function<void()> after;   ///< Counts, for example.
};

/// In the step that this thread captures: what belongs to each of its replays. Without a capture that asks for it, this does nothing.
void beside_each_replay(BesideReplay actions);

/// Whether this thread captures a step whose replays ask for it: the step does not happen now.
bool is_asked_for_replays();

/// For as long as it lives, what this thread says by beside_each_replay() is added to the list.
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
