#pragma once

#include <locale>
#include <sstream>
#include <utility>

namespace fsdp {

/// A stream of text whose numbers have the same form under every global locale of the program: 1024.5, not 1.024,5. Other programs and
/// other ranks read such texts.
template <typename Stream>
class ClassicStream : public Stream {
 public:
  template <typename... Arguments>
  explicit ClassicStream(Arguments&&... arguments) : Stream(std::forward<Arguments>(arguments)...) {
    this->imbue(std::locale::classic());
  }
};

}  // namespace fsdp
