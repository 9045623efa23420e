"""What the commands of the benchmark share: who takes turns with whom, on which hosts, and what becomes of the times."""
