#pragma once

#include <ATen/autocast_mode.h>

namespace fsdp {

/// As long as it is there, autocast's cache of cast weights takes nothing and gives nothing; unless `wanted` is false.
class NoAutocastCache {
 public:
  explicit NoAutocastCache(bool wanted = true) : restore_(wanted && at::autocast::is_autocast_cache_enabled()) {
    if (restore_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoAutocastCache() {
    if (restore_) at::autocast::set_autocast_cache_enabled(true);
  }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool restore_;
};

}  // namespace fsdp
