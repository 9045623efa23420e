#include "base/replays.h"

#include <utility>

namespace fsdp {
namespace {

thread_local std::vector<BesideReplay>* list = nullptr;

}  // namespace

void beside_each_replay(BesideReplay actions) {
  if (list != nullptr) list->push_back(std::move(actions));
}

bool is_asked_for_replays() { return list != nullptr; }

ReplayList::ReplayList(std::vector<BesideReplay>& actions) : before_(std::exchange(list, &actions)) {}
ReplayList::~ReplayList() { list = before_; }

}  // namespace fsdp
