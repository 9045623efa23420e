"""Every public name says what it is and which types it takes; the extension's stub names what the extension has."""

import ast
import dataclasses
import inspect
from types import ModuleType

import pytest
from public_names import faults_of, names_in, public_modules, public_names, stub_of

import libfsdp
from libfsdp import _C


@pytest.mark.parametrize("module", public_modules(libfsdp), ids=lambda module: module.__name__)
def test_module_says_what_it_is_and_what_is_public(module: ModuleType) -> None:
    assert module.__doc__
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_public_names_have_docstrings_and_annotations() -> None:
    names = public_names(libfsdp)
    assert [f"{module.__name__}: {fault}" for module, name in names for fault in faults_of(module, name)] == []


def test_stub_names_what_the_extension_has() -> None:
    assert differences("libfsdp._C", stub_of("libfsdp._C").body, _C) == []


def differences(where: str, body: list[ast.stmt], there: object) -> list[str]:
    """Names that the stub or the extension has alone, in classes, too."""
    stub = names_in(body)
    names = {name for name in vars(there) if not name.startswith("_")}
    found = [f"{where}.{name} is in the stub only" for name in sorted(stub) if not hasattr(there, name)]
    found += [f"{where}.{name} is not in the stub" for name in sorted(names - stub.keys())]
    for name, statement in stub.items():
        value = getattr(there, name, None)
        if isinstance(statement, ast.ClassDef) and inspect.isclass(value):
            found += differences(f"{where}.{name}", statement.body, value)
    return found


# That the check finds what is missing.


def bare(x, y: int):  # type: ignore[no-untyped-def]
    return x


def whole(x: int) -> int:
    """Says what it is."""
    return x


class Whole:
    """Says what it is."""

    size: int = 3

    def __init__(self, x: int) -> None:
        self.x = x

    @property
    def width(self) -> int:
        """Says what it is."""
        return self.x


class Bare:
    """Says what it is."""

    size = 3

    def __init__(self, x):  # type: ignore[no-untyped-def]
        self.x = x

    @property
    def width(self):  # type: ignore[no-untyped-def]
        return self.x


@dataclasses.dataclass
class BareData:
    x: int = 0


VALUE = 3
ANNOTATED_VALUE: int = 3


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("bare", ["no docstring", "x has no annotation", "what is returned has no annotation"]),
        ("whole", []),
        ("Whole", []),
        (
            "Bare",
            [
                "Bare.size, a value, has no annotation",
                "Bare.__init__: x has no annotation",
                "Bare.__init__: what is returned has no annotation",
                "Bare.width has no docstring",
                "Bare.width: what is returned has no annotation",
            ],
        ),
        ("BareData", ["BareData has no docstring"]),
        ("VALUE", ["VALUE, a value, has no annotation"]),
        ("ANNOTATED_VALUE", []),
    ],
)
def test_the_check_finds_what_is_missing(name: str, faults: list[str]) -> None:
    found = faults_of(inspect.getmodule(whole), name)  # type: ignore[arg-type]
    assert len(found) == len(faults), found
    assert [fault for fault, line in zip(faults, found, strict=True) if fault not in line] == []
