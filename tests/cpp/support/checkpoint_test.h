#pragma once

#include <gtest/gtest.h>

#include <string>

#include "fsdp/device_mesh.h"
#include "fsdp/save_load.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace fsdp::testing {

/// On rank 0, what changes files behind the ranks' backs; all wait before and after.
template <typename Change>
void on_rank_0(const DeviceMesh& mesh, const Change& change) {
  mesh.barrier();
  if (mesh.rank() == 0) change();
  mesh.barrier();
}

/// A test with a folder for its checkpoints.
class CheckpointTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }

  /// A model that has trained for a step, and is saved at `path`.
  static Training trained_and_saved(const std::string& path, const StackOptions& model = {}, const ExtraState& extra = {}) {
    Training run({}, adamw(), 11, model);
    run.train(0, 1);
    save(path, *run.model, *run.optimizer, extra);
    return run;
  }
  /// One of other values to load it into.
  static Training trained_otherwise(const StackOptions& model = {}) {
    Training other({}, adamw(), 12, model);
    other.train(0, 1);
    return other;
  }

  TemporaryFolder folder;
};

}  // namespace fsdp::testing
