"""The C++ examples in Markdown files.

    examples.py extract OUT FILE...   writes each example into OUT, and a program that runs the one it is told, and prints their names
    examples.py compare FILE COMMAND...   fails unless the command succeeds and prints what the file has
    examples.py check FILE...         fails if a block of C++, a link into the project, the name of a source or a table is not in order

A block marked ```cpp is a whole program with a `main`, which the build compiles and CTest runs. A block marked
```cpp fragment is a piece that can't stand alone. One marked ```cpp from FILE, or ```python from FILE, is an excerpt:
its lines stand in that file, in this order and next to each other except where `// ...` or `# ...` leaves some out.
A block marked ```output has what the program before it prints.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^\s*```+\s*(.*?)\s*$")
MAIN = re.compile(r"\bint main\(")
MAIN_WITHOUT_ARGUMENTS = re.compile(r"\bint main\(\)")
EXCERPT = re.compile(r"(?:cpp|python) from (\S+)")
LEFT_OUT = re.compile(r"^ *(?://|#) \.\.\.$")
ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
NAMED_FILE = re.compile(r"`((?:bench|docs|examples|include|python|src|tests|tools)/[\w./-]+\.(?:cpp|h|md|py))`")
HEADING = re.compile(r"^#+ +(.*?) *$")
BETWEEN_CELLS = re.compile(r"(?<!\\)\|")
BELOW_HEAD = re.compile(r"\|( *:?-+:? *\|)+")


@dataclass
class Block:
    file: Path
    line: int
    """Of the opening fence, from 1."""
    info: str
    text: str

    @property
    def is_program(self) -> bool:
        return self.info == "cpp"


def blocks_of(file: Path) -> Iterator[Block]:
    info: str | None = None
    lines: list[str] = []
    begin = 0
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif info is None:
            info, lines, begin = fence[1], [], number
        else:
            yield Block(file, begin, info, "\n".join(lines) + "\n")
            info, lines = None, []


def extract(out: Path, files: list[Path]) -> None:
    """Each example is a namespace of its own, so that a few files have all: compiling torch's headers takes longer than the examples."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    for old in out.glob("*.printed"):
        old.unlink()
    for file in files:
        blocks = list(blocks_of(file))
        programs = [k for k, block in enumerate(blocks) if block.is_program and MAIN.search(block.text)]
        for number, place in enumerate(programs, start=1):
            block = blocks[place]
            if not MAIN_WITHOUT_ARGUMENTS.search(block.text):
                sys.exit(f"{file}:{block.line}: the main of an example has no arguments")
            names.append(f"{file.stem.lower()}_{number}")
            write(out / f"{names[-1]}.cpp", in_namespace(names[-1], block))
            if blocks[place + 1 : place + 2] and blocks[place + 1].info == "output":
                write(out / f"{names[-1]}.printed", blocks[place + 1].text)
    spaces = [(name, namespace_of(name)) for name in names]
    declared = "".join(f"namespace {space} {{\nint program();\n}}\n" for _, space in spaces)
    called = "".join(f'  if (name == "{name}") return {space}::program();\n' for name, space in spaces)
    main = 'int main(int argc, char** argv) {\n  const std::string_view name = argc > 1 ? argv[1] : "";\n'
    write(out / "main.cpp", f"#include <string_view>\n\n{declared}\n{main}{called}  return 2;\n}}\n")
    print("\n".join(names))


def namespace_of(name: str) -> str:
    return "example_" + re.sub(r"\W", "_", name)


def in_namespace(name: str, block: Block) -> str:
    """The example without `main`. Compiler messages name the line of the document."""
    includes, lines = [], []
    for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
        is_include = line.startswith("#include")
        if is_include:
            includes.append(f'#line {number} "{block.file.as_posix()}"\n{line}\n')
        lines.append("" if is_include else MAIN_WITHOUT_ARGUMENTS.sub("int program()", line))
    text = "\n".join(lines)
    space = namespace_of(name)
    begin = f'namespace {space} {{\nint program();\n#line {block.line + 1} "{block.file.as_posix()}"\n'
    return f"{''.join(includes)}{begin}{text}\n}}  // namespace {space}\n"


def write(file: Path, text: str) -> None:
    """Leaves a file with this text as it is, so that nothing is compiled again."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def compare(expected: Path, command: list[str]) -> int:
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.stdout != expected.read_text(encoding="utf-8"):
        print(
            f"{' '.join(command)} prints\n{ran.stdout}where the document says\n{expected.read_text(encoding='utf-8')}"
        )
        return 1
    return ran.returncode


def text_of(file: Path) -> list[tuple[int, str]]:
    """The lines outside of blocks of code, with their numbers from 1."""
    lines = []
    inside = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append((number, line))
    return lines


def anchors_of(file: Path) -> set[str]:
    """As GitHub names the headings: lower case, hyphens for spaces, nothing else than letters, digits, hyphens and underscores."""
    headings = [match[1] for _, line in text_of(file) if (match := HEADING.match(line))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def faults_of_links(file: Path) -> list[str]:
    faults = []
    for number, line in text_of(file):
        for target, anchor in LINK.findall(line):
            if "://" in target:
                continue
            other = file.parent / target if target else file
            if not other.exists():
                faults.append(f"{file}:{number}: no such file: {target}")
            elif anchor and anchor not in anchors_of(other):
                faults.append(f"{file}:{number}: no such heading: {target}#{anchor}")
    return faults


def faults_of_names(file: Path) -> list[str]:
    return [
        f"{file}:{number}: no such file: {name}"
        for number, line in text_of(file)
        for name in NAMED_FILE.findall(line)
        if not (ROOT / name).exists()
    ]


def faults_of_tables(file: Path) -> list[str]:
    """Renderers drop the cells that a row has too many, and show a table as text if its second line is not one of dashes."""
    faults = []
    cells = rows = 0
    for number, line in text_of(file):
        if not line.startswith("|"):
            cells = rows = 0
            continue
        here = len(BETWEEN_CELLS.findall(line.rstrip()))
        cells = cells or here
        rows += 1
        if rows == 2 and not BELOW_HEAD.fullmatch(line.rstrip()):
            faults.append(f"{file}:{number}: the second line of a table has dashes only")
        if here != cells:
            faults.append(f"{file}:{number}: {here - 1} cells in a table of {cells - 1}")
    return faults


def fault_of_excerpt(block: Block, source: Path) -> str | None:
    """What an excerpt has that the source has not, if anything."""
    if not source.is_file():
        return f"there is no {source}"
    lines = source.read_text(encoding="utf-8").splitlines()
    begin, piece = 0, []
    for line in [*block.text.splitlines(), "// ..."]:
        if not LEFT_OUT.match(line):
            piece.append(line)
            continue
        starts = range(begin, len(lines) - len(piece) + 1)
        found = next((at for at in starts if lines[at : at + len(piece)] == piece), None)
        if found is None:
            return f"{source.relative_to(ROOT)} has not, in this place: {piece[0].strip()} ... {piece[-1].strip()}"
        begin, piece = found + len(piece), []
    return None


def check(files: list[Path]) -> int:
    faults = []
    for file in files:
        before = ""
        for block in blocks_of(file):
            if block.info == "output" and before not in ("cpp", "python"):
                faults.append(f"{file}:{block.line}: what is printed stands below the program that prints it")
            before = block.info
            if block.is_program and not MAIN.search(block.text):
                faults.append(f"{file}:{block.line}: C++ without main; mark it ```cpp fragment, or make it a program")
            elif excerpt := EXCERPT.fullmatch(block.info):
                if fault := fault_of_excerpt(block, ROOT / excerpt[1]):
                    faults.append(f"{file}:{block.line}: {fault}")
            elif block.info.startswith("cpp") and block.info not in ("cpp", "cpp fragment"):
                faults.append(f"{file}:{block.line}: unknown mark ```{block.info}")
        faults += faults_of_links(file)
        faults += faults_of_names(file)
        faults += faults_of_tables(file)
    print("\n".join(faults) if faults else f"{len(files)} files in order")
    return 1 if faults else 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["extract", out, *files]:
            extract(Path(out), [Path(file) for file in files])
            return 0
        case ["compare", file, *command]:
            return compare(Path(file), command)
        case ["check", *files]:
            return check([Path(file) for file in files])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
