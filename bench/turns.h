#pragma once

#include <cstdlib>
#include <iostream>
#include <optional>

namespace fsdp::bench {

/// What a benchmark whose variants take turns is told.
struct Turns {
  int ranks = 2;
  int rounds = 10;
};

/// Reads "[RANKS] [ROUNDS]" from a program's arguments. If they are something else, says so on stderr and returns nothing.
inline std::optional<Turns> read_turns(const char* program, int argc, char** argv, Turns turns) {
  if (argc > 3) {
    std::cerr << "usage: " << program << " [RANKS] [ROUNDS]\n";
    return std::nullopt;
  }
  if (argc > 1) turns.ranks = std::atoi(argv[1]);
  if (argc > 2) turns.rounds = std::atoi(argv[2]);
  if (turns.ranks < 1 || turns.rounds < 1) {
    std::cerr << program << ": ranks and rounds must be positive\n";
    return std::nullopt;
  }
  return turns;
}

}  // namespace fsdp::bench
