"""The C++ engine (src/bindings/). Programs use the package's own names."""

version: str
torch_version: str
