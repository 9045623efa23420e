"""Fails if a source file is so long that it holds more than one idea.

lengths.py ROOT
"""

import sys
from pathlib import Path

LONGEST = 500  # lines
FOLDERS = ("include", "src", "python", "examples", "tools", "bench", "tests", "scripts")
ENDINGS = {".h", ".cpp", ".py", ".pyi", ".sh"}


def main() -> int:
    root = Path(sys.argv[1])
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in ENDINGS]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    for path, length in lengths.items():
        if length > LONGEST:
            print(f"{path.relative_to(root)} has {length} lines, more than {LONGEST}: it holds more than one idea")
    return 1 if max(lengths.values()) > LONGEST else 0


if __name__ == "__main__":
    sys.exit(main())
