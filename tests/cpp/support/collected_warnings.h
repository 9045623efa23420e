#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace fsdp::testing {

/// While it lives, torch's warnings of this thread come here.
class CollectedWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text_ += warning.msg() + "\n"; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace fsdp::testing
