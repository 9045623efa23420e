"""Checks that the installed torch is the one that the extension was built with."""

import re

_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+.*)?")


def same_binaries(built: str, installed: str) -> bool:
    """Whether an extension built with torch ``built`` can be loaded beside torch ``installed``.

    Releases must agree in major and minor number and in the local build ("+cpu", "+cu126"); anything else (nightly
    builds, builds from source) in the whole version.
    """
    one, other = _RELEASE.fullmatch(built), _RELEASE.fullmatch(installed)
    if one is None or other is None:
        return built == installed
    return one.groups() == other.groups()


def require_same_binaries(built: str, installed: str, installed_at: str) -> None:
    """Raise ``ImportError`` unless :func:`same_binaries`. ``installed_at`` is the folder of the installed torch."""
    if not same_binaries(built, installed):
        raise ImportError(
            f"libfsdp was built with torch {built}, but torch {installed} is installed in {installed_at}; torch's "
            f"libraries are not compatible between versions. Install torch {built}, or build libfsdp again with the "
            "installed one: pip install --no-build-isolation --force-reinstall --no-deps <the source of libfsdp>"
        )
