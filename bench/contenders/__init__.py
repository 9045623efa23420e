"""What is measured: one rank of a contender, the models that all of them train, and a peer that needs help on a CPU."""
