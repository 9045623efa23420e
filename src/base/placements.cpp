#include "fsdp/placements.h"

#include "fsdp/error.h"

namespace fsdp {

Placements Placements::from_name(const std::string& name) {
  if (name == "no_shard" || name == "0") return no_shard();
  if (name == "optim" || name == "1") return optim();
  if (name == "optim_grads" || name == "2") return optim_grads();
  if (name == "optim_grads_params" || name == "3") return optim_grads_params();
  throw Error("unknown sharding strategy '" + name + "'; choose no_shard (0), optim (1), optim_grads (2) or optim_grads_params (3)");
}

}  // namespace fsdp
