"""One sharded model: its units, parameters, options and engine. The front ends are built on it."""
