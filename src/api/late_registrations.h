#pragma once

#include <functional>

namespace torch::nn {
class Module;
}

namespace fsdp::api {

/// A check, cheap enough for every training step: it throws Error if a parameter that requires a gradient has been registered in `root` or
/// below since this call. Empty if no shared pointer owns `root`, because then it is not known whether it still exists.
std::function<void()> check_of_registrations(const torch::nn::Module& root);

}  // namespace fsdp::api
