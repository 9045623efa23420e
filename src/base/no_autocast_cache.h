#pragma once

#include <ATen/autocast_mode.h>

namespace fsdp {

/// A guard. During its lifetime, autocast does not use its cache of cast weights. With `wanted` = false it does nothing.
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
