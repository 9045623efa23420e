// tokenizer_probe MODEL TEXT OUT: writes the tokens of the file TEXT, by the tokenizer in the folder MODEL, into the file OUT as int32, and
// prints them as text again.

#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "llama/tokenizer.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const llama::Tokenizer tokenizer(argv[1]);
    const auto tokens = tokenizer.encode(text);
    std::ofstream(argv[3], std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * sizeof(std::int32_t)));
    std::cout << tokenizer.decode(tokens);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
