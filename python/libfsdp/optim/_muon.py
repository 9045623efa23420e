"""torch.optim.Muon on matrices of which each rank has some rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from libfsdp import _C
from libfsdp._comm.mesh import device_of
from libfsdp.optim._optimizer_settings import tell_settings
from libfsdp.optim._optimizers import BeginsAnew
from libfsdp.optim._preparing import cut_dims, loss_of, prepare_gradient, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class _Row:
    """The matrices of one parameter group on one mesh that are cut over the same ranks (or, without a process group, not cut).

    Attributes:
        group: the ranks over which a matrix is cut.
        mesh: the mesh of the matrices, including their replicas.
        matrices: for each index in the parameter group: rows, columns, the dimension that is cut, and the owner.
    """

    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None = None
    rank: int = 0
    ranks: int = 1
    matrices: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)

    def add(self, index: int, shape: torch.Size, dim: int) -> None:
        self.matrices[index] = (*shape, dim, 0)

    def share_out(self) -> None:
        """Gives each matrix an owner: the largest first, each to the rank that has the least work."""
        work = [0.0] * self.ranks
        for index, (rows, columns, dim, _) in sorted(self.matrices.items(), key=lambda item: -_work(*item[1][:2])):
            owner = work.index(min(work))
            work[owner] += _work(rows, columns)
            self.matrices[index] = (rows, columns, dim, owner)

    def require_equal_gradients(self, number: int, parameters: list[Tensor]) -> list[int]:
        """Compares the gradients that ranks have. Otherwise ranks might wait for each other, and replicas might become different.

        Returns:
            Indices of the matrices of which this rank has neither elements nor a gradient, while other ranks have one.

        Raises:
            Error: on all ranks of the mesh, if they differ.
        """
        if self.mesh is None:
            return []
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim) if self.mesh.size(dim) > 1]
        shapes = {index: self.matrices[index][:2] for index in sorted(self.matrices)}
        mine = {index: (*shape, _has_gradient(parameters[index])) for index, shape in shapes.items()}
        flags = [having for *_, having in mine.values()]
        # The ranks agree if the greatest digests equal the smallest.
        bounds = torch.tensor(
            [sign * _digest(of) for of in (mine, shapes) for sign in (1, -1)] + [int(None in flags)],
            device=device_of(self.mesh),
        )
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        *digests, asks = bounds.tolist()  # The host waits once.
        differ, shapes_differ = sum(digests[:2]) != 0, sum(digests[2:]) != 0
        if not differ and not asks:
            return []
        if asks and not shapes_differ:
            some = torch.tensor([[having is has for having in flags] for has in (True, False)], dtype=torch.int64)
            some = some.to(device_of(self.mesh))
            for group in groups:
                dist.all_reduce(some, dist.ReduceOp.MAX, group=group)
            if not some.all(0).any():
                return [
                    index
                    for index, had, having in zip(mine, some[0].tolist(), flags, strict=True)
                    if had and having is None
                ]
        every = [(dist.get_rank(), mine)]
        for group in groups:
            lists: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(lists, every, group=group)
            every = [one for of_ranks in lists for one in of_ranks]
        raise _C.Error(_difference(number, dict(every)))


def _has_gradient(parameter: Tensor) -> bool | None:
    """Returns None if this rank has no elements of the parameter and no gradient; other ranks may have one."""
    if parameter.grad is not None:
        return True
    return None if _C.local_of(parameter).numel() == 0 else False


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _difference(number: int, of_ranks: dict[int, dict[int, tuple[int, int, bool | None]]]) -> str:
    """Describes the difference between ranks, in the same words on each."""
    rank, first = min(of_ranks.items())
    for other, matrices in sorted(of_ranks.items()):
        for index in sorted(first.keys() | matrices.keys()):
            mine, theirs = first.get(index), matrices.get(index)
            if mine is None or theirs is None or mine[:2] != theirs[:2]:
                shapes = ["not there" if one is None else f"of the shape {list(one[:2])}" for one in (mine, theirs)]
                return (
                    f"Muon: matrix {index} of group {number} is {shapes[0]} on rank {rank}, and {shapes[1]} on rank {other}; give "
                    "Muon the same parameters in the same order on all ranks"
                )
    for index, (rows, columns, _) in sorted(first.items()):
        having, without = (
            [which for which, matrices in sorted(of_ranks.items()) if matrices[index][2] is has]
            for has in (True, False)
        )
        if having and without:
            return (
                f"Muon: parameter {index} of group {number}, of the shape {[rows, columns]}, has a gradient on ranks {having}, and none "
                f"on ranks {without}. A matrix is updated as a whole: give its gradient (or zeros) to all ranks, or to none"
            )
    raise AssertionError("the ranks do not differ")


def _work(rows: int, columns: int) -> float:
    """Returns the cost of the iterations for a matrix, up to a constant factor."""
    return float(rows) * columns * min(rows, columns)


class Muon(BeginsAnew, torch.optim.Muon):
    """torch.optim.Muon, stepped in C++.

    Arguments, ``param_groups``, state and ``state_dict()`` are torch's. Each rank has some rows (or columns) of a sharded matrix, but the
    update needs all of it. Each matrix has an owner: the rows of its momentum are sent there in bfloat16, made orthogonal on that rank
    alone, and sent back. A step is two ``all_to_all_single`` for each group of parameters that lie on the same ranks, after an
    ``all_reduce`` of five numbers by which they see that they have gradients of the same matrices.

    The result is that of torch's own on the whole matrix: to the last bit where each rank's part of it fills whole vector
    registers (multiples of 64 bytes); elsewhere last bits of its last few elements may differ.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the matrices that have a gradient; see torch.optim. Collective.

        Args:
            closure: computes the loss again, and gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: if a matrix is cut along several dimensions of its mesh.
            Error: if a matrix has a gradient on some of the ranks that have elements of it, or the ranks give other matrices:
                on all of them, before anything has changed.
        """
        loss = loss_of(closure)
        tell_settings(self)
        with torch.no_grad():
            empty: list[Tensor] = []
            rows = [(n, row) for n, group in enumerate(self.param_groups) for row in self._rows(n, group["params"])]
            for number, row in rows:
                parameters = self.param_groups[number]["params"]
                empty += [parameters[i] for i in row.require_equal_gradients(number, parameters)]
            # A rank without elements of a matrix may own it: it takes part as if its gradient were there.
            for parameter in empty:
                parameter.grad = zeros_like(parameter)
            for number, row in rows:
                self._step_row(number, self.param_groups[number], row)
            for parameter in empty:
                parameter.grad = None
        return loss

    def _rows(self, number: int, parameters: list[Tensor]) -> list[_Row]:
        """Returns the rows, which are kept from the last step unless the group has other parameters."""
        known: dict[int, tuple[list[Tensor], list[_Row]]] = self.__dict__.setdefault("_libfsdp_rows", {})
        of, rows = known.get(number, ([], []))
        if len(of) != len(parameters) or any(a is not b for a, b in zip(of, parameters, strict=True)):
            rows = _rows_of(parameters)
            known[number] = list(parameters), rows
        return rows

    def _step_row(self, number: int, group: dict[str, Any], row: _Row) -> None:
        def begin() -> _C.MuonStep:
            return _C.MuonStep("Muon", group, number, self.state, row.matrices, row.ranks, row.rank)

        step = begin()
        if step.to_prepare:
            for i in step.to_prepare:
                parameter = group["params"][i]
                prepare_gradient(parameter)
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = zeros_like(parameter.grad)
            step = begin()
        if step.is_empty:
            return
        to_ranks, from_ranks = step.numels()
        received = _exchange(step.directions(), to_ranks, from_ranks, row.group)
        step.apply(_exchange(step.orthogonalize(received), from_ranks, to_ranks, row.group))


def _exchange(sent: Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return sent
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=group)
    return received


def _rows_of(parameters: list[Tensor]) -> list[_Row]:
    rows: dict[tuple[DeviceMesh | None, str], _Row] = {}
    for index, parameter in enumerate(parameters):
        group, dim = _cut_of(parameter, index)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        of = (mesh, "" if group is None else group.group_name)
        if of not in rows:
            ranks = {} if group is None else {"rank": dist.get_rank(group), "ranks": dist.get_world_size(group)}
            rows[of] = _Row(group, mesh, **ranks)
        rows[of].add(index, parameter.shape, dim)
    for row in rows.values():
        row.share_out()
    return list(rows.values())


def _cut_of(parameter: Tensor, index: int) -> tuple[dist.ProcessGroup | None, int]:
    """Returns the ranks that have parts of a parameter, and the dimension that is cut; no ranks if each has all of it."""
    if not isinstance(parameter, DTensor):
        return None, 0
    placements = parameter.placements
    cut = cut_dims(parameter)
    if not cut:
        return None, 0
    placement = placements[cut[0]]
    if len(cut) > 1 or type(placement) is not Shard:
        raise ValueError(
            f"Muon: parameter {index} of the shape {list(parameter.shape)} has the placements {placements}; a matrix may be "
            "cut along one dimension of its mesh, by Shard. Leave it to another optimizer"
        )
    return parameter.device_mesh.get_group(cut[0]), placement.dim
