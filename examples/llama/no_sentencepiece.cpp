#include <stdexcept>

#include "llama/pieces.h"

namespace llama {

std::unique_ptr<Pieces> open_pieces(const std::filesystem::path& file) {
  throw std::runtime_error(
      file.string() +
      " is read by libsentencepiece, which was not there when this program was built: install libsentencepiece-dev and "
      "run CMake again, or give tokens, not text");
}

}  // namespace llama
