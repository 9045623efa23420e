"""Memory and time of a training step, computed before it runs."""
