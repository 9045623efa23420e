#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstdint>
#include <stdexcept>

namespace fsdp::testing {

/// While it lives, sees every operator of this thread, and of the backwards that this thread starts; not those that operators call in
/// their turn. Once armed, one of them throws instead of computing: anything may, where memory is short.
class FailingOperator {
 public:
  FailingOperator() = default;
  ~FailingOperator() { disarm(); }
  FailingOperator(const FailingOperator&) = delete;
  FailingOperator& operator=(const FailingOperator&) = delete;

  /// The operator after so many others throws std::runtime_error.
  static void arm(std::int64_t others) { left_ = others; }
  static void disarm() { left_ = kNone; }

 private:
  static constexpr std::int64_t kNone = -1;
  /// torch keeps it for tests.
  static constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

  static void count(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (left_ != kNone && left_-- == 0) throw std::runtime_error("planned failure");
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    op.callBoxed(stack);
  }

  static inline thread_local std::int64_t left_ = kNone;
  static inline torch::Library library_{torch::Library::IMPL, "_", kKey, __FILE__, __LINE__};
  static inline const bool registered_ = (library_.fallback(torch::CppFunction::makeFromBoxedFunction<&FailingOperator::count>()), true);

  c10::impl::IncludeDispatchKeyGuard seen_{kKey};
};

}  // namespace fsdp::testing
