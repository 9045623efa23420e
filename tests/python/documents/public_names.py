"""What a package promises to its users, and what is missing there: docstrings and annotations.

What the extension defines has its annotations in the stub beside it (``_C.pyi``), as Python sees none.
"""

import ast
import enum
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def public_modules(package: ModuleType) -> list[ModuleType]:
    """The package, and the modules below whose names have no underscore in front."""
    modules = [package]
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            modules.append(importlib.import_module(found.name))
    return modules


def public_names(package: ModuleType) -> list[tuple[ModuleType, str]]:
    """The names of ``__all__`` of each public module; dunders such as ``__version__`` are values, not promises."""
    return [
        (module, name)
        for module in public_modules(package)
        for name in module.__all__
        if not (name.startswith("__") and name.endswith("__"))
    ]


def faults_of(module: ModuleType, name: str) -> list[str]:
    """What is missing at the name, a line each. Another package's things, passed on, are not ours to complete."""
    value = getattr(module, name)
    if getattr(value, "__module__", module.__name__).split(".")[0] != module.__name__.split(".")[0]:
        return []
    if inspect.isclass(value):
        return list(_faults_of_class(value))
    if callable(value):
        return list(_faults_of_callable(value, name, value.__module__, [name]))
    if inspect.ismodule(value):
        return [] if value.__doc__ else [f"{name} has no docstring"]
    annotated = _annotated_names(_tree(Path(inspect.getfile(module))))
    return [] if name in annotated else [f"{name}, a value, has no annotation in {module.__name__}"]


def _faults_of_class(cls: type) -> Iterator[str]:
    # A dataclass without a docstring gets its signature for one.
    if not cls.__doc__ or cls.__doc__.startswith(f"{cls.__name__}("):
        yield f"{cls.__qualname__} has no docstring"
    for name, member in vars(cls).items():
        if name.startswith("_") and not (name == "__init__" and inspect.isfunction(member)):
            continue
        path = [*cls.__qualname__.split("."), name]
        label = ".".join(path)
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        if isinstance(member, property):
            # The extension's getters have no text of their own.
            faults = _faults_of_callable(member.fget, label, cls.__module__, path)
            yield from (fault for fault in faults if not (member.__doc__ and "docstring" in fault))
        elif inspect.isclass(member):
            yield from _faults_of_class(member)
        elif callable(member):
            # What a constructor does, the class's docstring says.
            faults = _faults_of_callable(member, label, cls.__module__, path)
            yield from (fault for fault in faults if name != "__init__" or "docstring" not in fault)
        elif not issubclass(cls, enum.Enum) and not hasattr(member, "__get__") and not _declared(cls, name):
            yield f"{label}, a value, has no annotation"


def _declared(cls: type, name: str) -> bool:
    return name in inspect.get_annotations(cls) or _is_extension(cls.__module__)


def _faults_of_callable(function: object, label: str, module: str, path: list[str]) -> Iterator[str]:
    if not getattr(function, "__doc__", None):
        yield f"{label} has no docstring"
    if inspect.isfunction(function):
        missing = _missing_annotations(inspect.signature(function))
    elif _is_extension(module):
        missing = _missing_in_stub(module, path)
    else:
        return
    for what in missing:
        yield f"{label}: {what} has no annotation"


def _missing_annotations(signature: inspect.Signature) -> list[str]:
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    missing = [p.name for p in parameters if p.annotation is p.empty]
    return missing + ["what is returned"] * (signature.return_annotation is signature.empty)


def _is_extension(module: str) -> bool:
    return module.rsplit(".", 1)[-1] == "_C"


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _annotated_names(tree: ast.Module) -> set[str]:
    statements = (s for s in tree.body if isinstance(s, ast.AnnAssign))
    return {s.target.id for s in statements if isinstance(s.target, ast.Name)}


def stub_of(module: str) -> ast.Module:
    """The stub beside the extension ``module``."""
    path = inspect.getfile(importlib.import_module(module))
    return _tree(Path(path).parent / (module.rsplit(".", 1)[-1] + ".pyi"))


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What the statements of a stub define, by name."""
    names: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            names[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = statement
    return names


def _missing_in_stub(module: str, path: list[str]) -> list[str]:
    body = stub_of(module).body
    for part in path[:-1]:
        outer = names_in(body).get(part)
        body = outer.body if isinstance(outer, ast.ClassDef) else []
    found = names_in(body).get(path[-1])
    if found is None:
        return ["its place in the stub"]
    if not isinstance(found, ast.FunctionDef):
        return []
    arguments = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    return missing + ["what is returned"] * (found.returns is None)
