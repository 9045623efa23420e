#pragma once

// Misuse on all ranks alike. Each is an adversary: see adversaries.cpp.
namespace adversaries {

void makes_the_optimizer_first();
void shards_twice();
void converts_afterwards();
void requires_gradients_afterwards();
void drops_gradients_in_a_hook();
void goes_back_twice();
void goes_back_through_an_old_graph();
void steps_without_a_backward();
void resets_after_a_failed_backward();
void reads_by_pointers();
void outlives_the_model();

}  // namespace adversaries
