"""Fails if a class has so many public methods, or a struct so many public fields, that it holds more than one idea.

classes.py ROOT

Constructors, destructors, assignments and what is deleted do not count as methods, nor do static members as fields. Nested classes count
for themselves.
"""

import dataclasses
import re
import sys
from pathlib import Path

from verdict import tell

MOST_METHODS = 25
MOST_FIELDS = 15
FOLDERS = ("include", "src")
ENDINGS = {".h", ".cpp"}

# What may have more, and why.
EXCEPTIONS = {
    "FSDPModule": "it has the methods of FSDP2's FSDPModule, and those of a model that LibTorch's modules do not have",
    "FullyShardOptions": "it has the arguments of FSDP2's fully_shard and of Megatron-FSDP's, each as one option",
}

NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*|R"\(.*?\)"|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'',
    re.DOTALL | re.MULTILINE,
)
HEAD = re.compile(r"\b(?P<key>class|struct|union)\s+(?P<name>\w+(?:::\w+)*)?[^;{}()=]*\{")
ACCESS = re.compile(r"(public|protected|private)\s*:")
NO_MEMBER = re.compile(r"(?:friend|using|typedef|static_assert|enum|class|struct|union|FSDP_\w+)\b")


@dataclasses.dataclass
class Class:
    path: Path
    name: str
    methods: int = 0
    fields: int = 0


def without_noise(text: str) -> str:
    """The text without comments, directives and what literals say."""

    def replacement(match: re.Match[str]) -> str:
        first = match.group()[0]
        return '""' if first in 'R"' else "0" if first == "'" else " "

    return NOISE.sub(replacement, text)


def block_end(text: str, begin: int) -> int:
    """Returns the position behind the bracket that closes the one at `begin`."""
    depth = 0
    for position in range(begin, len(text)):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError("brackets are not balanced")


def without_angles(text: str) -> str:
    """The text without template arguments."""
    before = None
    while before != text:
        before, text = text, re.sub(r"<[^<>;{}]*>", "", text)
    return text


def is_method(member: str) -> bool:
    opens = member.find("(")
    ends = [member.find(mark) for mark in "={" if mark in member]
    return opens >= 0 and ("operator" in member or all(opens < end for end in ends))


def members(body: str, access: str) -> list[tuple[str, str]]:
    """The members of a class, each with its access. Bodies of functions are left out."""
    found = []
    begin = position = 0
    while position < len(body):
        character = body[position]
        statement = body[begin:position].strip()
        if character == ":" and (label := ACCESS.fullmatch(statement + ":")):
            access = label.group(1)
            begin = position + 1
        elif character in "({":
            position = block_end(body, position)
            is_body = character == "{" and is_method(without_angles(statement))
            if is_body and not body[position:].lstrip().startswith(
                (",", "{")
            ):  # else the list of a constructor goes on
                found.append((access, statement))
                begin = position
            continue
        elif character == ";":
            if statement:
                found.append((access, statement))
            begin = position + 1
        position += 1
    return found


def count(one: Class, key: str, body: str) -> None:
    own = one.name.rpartition("::")[2]
    for access, member in members(body, "private" if key == "class" else "public"):
        text = re.sub(r"^template\s*|\[\[[^\]]*\]\]\s*", "", without_angles(member)).strip()
        if access != "public" or NO_MEMBER.match(text):
            continue
        if not is_method(text):
            declarators = len(re.findall(r",(?![^{}()]*[})])", text)) + 1
            one.fields += 0 if text.startswith("static ") else declarators
        elif not re.search(rf"(?:^|[\s~]){own}\s*\(|\boperator=\s*\(|=\s*delete$", text):
            one.methods += 1


def classes(path: Path, text: str) -> list[Class]:
    """Those that are defined in a file."""
    text = without_noise(text)
    found = []
    for head in HEAD.finditer(text):
        if re.search(r"(?:\benum|[<,])\s*$", text[: head.start()]):
            continue
        one = Class(path, head.group("name") or "(no name)")
        count(one, head.group("key"), text[head.end() : block_end(text, head.end() - 1) - 1])
        found.append(one)
    return found


def faults(root: Path) -> list[str]:
    found = []
    needed = set()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in ENDINGS):
        for one in classes(path.relative_to(root), path.read_text(encoding="utf-8")):
            counts = ((one.methods, MOST_METHODS, "public methods"), (one.fields, MOST_FIELDS, "public fields"))
            for number, most, what in counts:
                if number <= most:
                    continue
                needed.add(one.name)
                if one.name not in EXCEPTIONS:
                    found.append(f"{one.path}: {one.name} has {number} {what}, more than {most}: divide it by idea")
    return found + [f"{name} needs no exception" for name in sorted(EXCEPTIONS.keys() - needed)]


if __name__ == "__main__":
    sys.exit(tell(faults))
