"""The class that sharded modules get in addition to their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from libfsdp import _C
from libfsdp._fsdp2.fsdp_module import FSDPModule as _Base
from libfsdp.megatron._diagnostics import (
    ParameterNorms,
    group_table,
    log_norms,
    per_parameter_norms,
    require_disjoint_shards,
)
from libfsdp.megatron._mixin import states_of

if TYPE_CHECKING:
    from torch import nn

    from libfsdp.megatron._parameter_groups import ParameterGroup

logger = logging.getLogger("libfsdp")


class FSDPModule(_Base):
    """The class that fully_shard gives a module in addition to its own. It has the methods of libfsdp.FSDPModule.

    Peer: ``megatron_fsdp.v2.FSDPModule``.
    """

    _fsdp_param_groups: tuple[ParameterGroup, ...]

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Its parameters, by dtype and by whether they are trained. Parameters of sharded modules below are left out."""
        return self._fsdp_param_groups

    def stop_communication(self) -> None:
        """Waits for reductions that are under way, and delivers their gradients. Call it on the root, between backwards.

        Raises:
            RuntimeError: inside of a backward.
        """
        if _C.inside_backward():
            raise RuntimeError("stop_communication cannot be called inside of a backward")
        for state in states_of(cast("nn.Module", self)):
            if state.model is not None:
                state.model.engine.finish_gradient_sync()
                state.model.deliver_gradients()

    def compute_per_param_norms(self) -> dict[str, ParameterNorms]:
        """Returns the 2-norms of all parameters and gradients in and below it, over all ranks. Collective."""
        return per_parameter_norms(cast("nn.Module", self))

    def log_per_param_norms(self) -> None:
        """Writes these norms to the logger "libfsdp", on the first rank. Collective."""
        log_norms(self.compute_per_param_norms())

    def log_parameter_groups(self) -> str:
        """Writes a table of all parameter groups in and below it to the logger "libfsdp", and returns it."""
        modules = cast("nn.Module", self).named_modules()
        table = group_table({name: one._fsdp_param_groups for name, one in modules if isinstance(one, FSDPModule)})
        logger.info("%s", table)
        return table

    def check_all_fsdp_buffers(self) -> None:
        """Checks that no two shards in and below it share memory.

        Raises:
            RuntimeError: if two do, with their names.
        """
        require_disjoint_shards(cast("nn.Module", self))
