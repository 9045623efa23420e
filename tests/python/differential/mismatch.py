"""Comparing what ranks have with what they should have."""

from __future__ import annotations

from torch import Tensor


class Mismatch(AssertionError):
    """What differs."""


def same(what: str, got: Tensor, expected: Tensor, bound: Tensor | None) -> None:
    """Equal, or within a bound of each element."""
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise Mismatch(f"{what}: {got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}")
    near = (got.double() - expected.double()).abs() <= (0.0 if bound is None else bound)
    wrong = ~(near | (got == expected) | (got.isnan() & expected.isnan()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        within = "" if bound is None else f" within {bound[at].item():.3g}"
        raise Mismatch(
            f"{what}: {int(wrong.sum())} of {wrong.numel()}, first at {at}: {got[at].item()!r}, not {expected[at].item()!r}{within}"
        )
