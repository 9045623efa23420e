"""The ranks of a Megatron-FSDP model by the names of their dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Sequence


class FSDPDistributedIndex:
    """The mesh dimensions that shard, replicate, and cut tensors, for dense parameters and for experts.

    Peer: ``megatron_fsdp.FSDPDistributedIndex``.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: dist.ProcessGroup | None = None,
        hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    ) -> None:
        """Looks the dimensions up.

        Args:
            device_mesh: the mesh of the dense parameters.
            dp_shard_dim: the dimension, possibly a flattened one (data and context parallel), that shards.
            dp_outer_dim: the dimension that replicates, or with ``hsdp_outer_dp_shard`` shards optimizer state.
            tp_dim: the dimension over which tensor-parallel parameters are cut.
            hybrid_fsdp_group: all ranks of the first two; needed with ``dp_outer_dim``.
            hybrid_fsdp_expt_group: the same for experts.
            hsdp_outer_dp_shard: whether optimizer state is sharded over the outer dimension.
            expt_device_mesh: the mesh of the experts' parameters, with the same names.
            fsdp_group_ag: a group of the ranks of ``dp_shard_dim``, which is checked. Gathers and reductions have connections of their own.
            expt_fsdp_group_ag: the same for experts.

        Raises:
            ValueError: if the mesh does not have a dimension, or if a group is missing or has other ranks.
        """
        device_mesh = on_host_without_device(device_mesh)
        expt_device_mesh = None if expt_device_mesh is None else on_host_without_device(expt_device_mesh)
        self.device_mesh = device_mesh
        self.dp_shard_dim = dp_shard_dim
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.use_hybrid_fsdp = dp_outer_dim is not None
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.expt_device_mesh = expt_device_mesh
        self.hybrid_fsdp_group = hybrid_fsdp_group
        self.hybrid_fsdp_expt_group = hybrid_fsdp_expt_group
        self.fsdp_group_ag = fsdp_group_ag
        self.expt_fsdp_group_ag = expt_fsdp_group_ag
        if submesh(device_mesh, dp_shard_dim) is None:
            raise ValueError(
                f"dp_shard_dim={dp_shard_dim!r} is no dimension of the mesh {device_mesh}: it names what shards"
            )
        if dp_outer_dim is not None:
            if submesh(device_mesh, dp_outer_dim) is None:
                raise ValueError(f"dp_outer_dim={dp_outer_dim!r} is no dimension of the mesh {device_mesh}")
            if hybrid_fsdp_group is None:
                raise ValueError(
                    "dp_outer_dim needs hybrid_fsdp_group, the group of all ranks of dp_outer_dim and dp_shard_dim, as "
                    "device_mesh[(outer, shard)]._flatten(name).get_group() gives it"
                )
        for name, expert in (("fsdp_group_ag", False), ("expt_fsdp_group_ag", True)):
            self._check_gather_group(name, is_expert_parallel=expert)

    def _check_gather_group(self, name: str, *, is_expert_parallel: bool) -> None:
        given: dist.ProcessGroup | None = getattr(self, name)
        if given is None:
            return
        own = self.get_fsdp_group(is_expert_parallel)
        if own is None:
            raise ValueError(
                f"{name} is a group of experts' ranks, and there is no expt_device_mesh: give both, or none"
            )
        ranks, expected = (dist.get_process_group_ranks(group) for group in (given, own))
        if ranks != expected:
            raise ValueError(
                f"{name} has the ranks {ranks}, and dp_shard_dim={self.dp_shard_dim!r} has {expected}: gathers need a group of the "
                "same ranks, in the same order"
            )

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh of one dimension, or of several in this order.

        Raises:
            ValueError: if the mesh does not have one of them.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (
            (mesh_dim_names,) if isinstance(mesh_dim_names, str) or mesh_dim_names is None else tuple(mesh_dim_names)
        )
        parts = [None if mesh is None else submesh(mesh, name) for name in names]
        if any(part is None for part in parts):
            raise ValueError(
                f"{names} are not all dimensions of the {'expert ' if is_expert_parallel else ''}mesh {mesh}"
            )
        found = [part for part in parts if part is not None]
        return found[0] if len(found) == 1 else DeviceMesh._concatenate(found)

    def data_parallel_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """One dimension that shards, or two: the first replicates or shards optimizer state."""
        assert self.dp_shard_dim is not None
        outer = () if self.dp_outer_dim is None else (self.dp_outer_dim,)
        return self.get_submesh((*outer, self.dp_shard_dim), is_expert_parallel)

    def tensor_parallel_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The dimension that cuts tensors, if there is one."""
        mesh = self.get_root_mesh(is_expert_parallel)
        return None if mesh is None else submesh(mesh, self.tp_dim)

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """All ranks that average a gradient."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        return self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """The ranks that share the shards of a parameter."""
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self._group_of(self.dp_shard_dim, is_expert_parallel)

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """The ranks of the outer dimension, if there is one."""
        return self._group_of(self.dp_outer_dim, is_expert_parallel)

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The mesh that was given."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Returns this rank's piece if optimizer state is sharded over both dimensions. The inner dimension cuts first.

        Raises:
            ValueError: if it is not.
        """
        if not self.hsdp_outer_dp_shard:
            raise ValueError("get_logical_hybrid_fsdp_rank: optimizer state is not sharded over the outer dimension")
        mesh = self.data_parallel_mesh(is_expert_parallel)
        return mesh.get_local_rank(1) * mesh.size(0) + mesh.get_local_rank(0)

    def _group_of(self, name: str | None, is_expert_parallel: bool) -> dist.ProcessGroup | None:
        mesh = self.get_root_mesh(is_expert_parallel)
        found = None if mesh is None else submesh(mesh, name)
        return None if found is None else found.get_group()


def on_host_without_device(mesh: DeviceMesh) -> DeviceMesh:
    """Returns a CPU mesh for a mesh of devices that do not exist. Megatron-Core's adapter makes CUDA meshes on any machine."""
    if torch.get_device_module(mesh.device_type).is_available():
        return mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def submesh(mesh: DeviceMesh, name: str | None) -> DeviceMesh | None:
    """Returns the mesh of a dimension, which may be a flattened one; None if there is none of this name."""
    if name is None:
        return None
    if mesh.mesh_dim_names == (name,):
        return mesh
    try:
        return mesh[name]
    except (KeyError, RuntimeError, ValueError):
        return None
