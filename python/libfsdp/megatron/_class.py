"""The module that wraps a sharded one, as in Megatron-FSDP."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from libfsdp import _C
from libfsdp._comm.mesh import device_of
from libfsdp._comm.registered_memory import RegisteredMemory, can_register
from libfsdp._core.function_calls import weak_method
from libfsdp._core.sharded_parameter import local_of
from libfsdp.megatron._buffer import ParamAndGradBuffer
from libfsdp.megatron._config import (
    DistributedDataParallelConfig,
    ShardingStrategy,
    adopt,
    policy_of,
    strategy_of,
    tell_of_options_without_effect,
)
from libfsdp.megatron._fused_gradients import FusedGradients
from libfsdp.megatron._gradients import MainGradients, ReplicatedScalars
from libfsdp.megatron._meta import initialize
from libfsdp.megatron._policy import MixedPrecisionPolicy
from libfsdp.megatron._protocol import is_expert
from libfsdp.megatron._quantized import QuantizedOptions, discard_transposed_after_forward, is_quantized
from libfsdp.megatron._units import UnitOptions, classes_of, shard_units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from libfsdp._core.model import Model
    from libfsdp.megatron._index import FSDPDistributedIndex


class MegatronFSDP(nn.Module):
    """A module that is sharded as :func:`libfsdp.fully_shard` shards it, with the methods of Megatron-FSDP's users.

    Peer: ``megatron_fsdp.MegatronFSDP``. With automatic synchronization, ``parameter.grad`` exists after each backward; otherwise after
    :meth:`finish_grad_sync`, which an optimizer's step calls.

    Attributes:
        module: the module that was given.
        dist_index: the ranks.
        ddp_config: the options.
        mp_policy: the dtypes.
        model_auto_sync: whether parameters have their gradients after each backward.
        microbatch_count: the number of backwards since the last synchronization.
        param_and_grad_buffer: a view of the units.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: tuple[type[nn.Module], ...] | None = None,
        report_nan_in_param_grad: bool = False,
    ) -> None:
        """Shards the module, in place.

        Args:
            module: a module with ordinary parameters, or tensor-parallel ones (DTensors, or with Megatron's attributes).
            dist_index: the ranks.
            ddp_config: options, also as a dataclass of Megatron-Core's, whose older ones say the dtypes, too; without them, all is
                sharded and communication overlaps, with those of the arguments below.
            mixed_precision_policy: dtypes.
            fsdp_unit_modules: classes, or their import paths, whose modules are gathered and freed as units. Parameters in none of them
                stay gathered until their values change.
            disable_bucketing: changes nothing.
            device: the device to which the module is moved first.
            calculate_per_token_loss: gradients are added up over the ranks, and not divided by their number.
            init_model_with_meta_device: parameters on meta get their values by ``reset_parameters``, after sharding.
            sync_model_each_microbatch: see ``set_model_auto_sync``.
            keep_fp8_transpose_cache: the transposed copies of TransformerEngine's quantized parameters stay from forward on.
            nccl_ub: the option of ``ddp_config``; so are the next three.
            fsdp_double_buffer: see there.
            fsdp_db_use_persist_buf_on_alloc_fail: see there.
            disable_symmetric_registration: see there.
            enable_fine_grained_param_gather_hook: each module that has parameters of its own is a unit.
            enable_fine_grained_param_gather_backward_hook: the same.
            fine_grained_recurse_module_types: with these, modules that are one unit with all below them: for those that compute with
                the parameters of modules which they do not call.
            report_nan_in_param_grad: whether each backward raises if gradients have NaN, with the parameters' names.

        Raises:
            ValueError: for options that do not fit each other, the mesh, or TransformerEngine's quantized parameters.
        """
        super().__init__()
        if ddp_config is not None and not hasattr(ddp_config, "megatron_fsdp_main_params_dtype"):
            mixed_precision_policy = policy_of(ddp_config)
        self.ddp_config = (
            adopt(ddp_config)
            if ddp_config is not None
            else DistributedDataParallelConfig(
                data_parallel_sharding_strategy="optim_grads_params",
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                keep_fp8_transpose_cache=keep_fp8_transpose_cache,
                nccl_ub=nccl_ub,
                fsdp_double_buffer=fsdp_double_buffer,
                fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
                disable_symmetric_registration=disable_symmetric_registration,
            )
        )
        strategy = strategy_of("data_parallel_sharding_strategy", self.ddp_config.data_parallel_sharding_strategy)
        if init_model_with_meta_device and strategy == ShardingStrategy.NO_SHARD:
            raise ValueError(
                "init_model_with_meta_device needs sharding: with 'no_shard' each rank has the whole model all the same; "
                "build it on the device"
            )
        quantized = QuantizedOptions(
            strategy=strategy,
            main_params_dtype=mixed_precision_policy.main_params_dtype,
            keeps_transposed=self.ddp_config.keep_fp8_transpose_cache,
        )
        quantized.mark(module)
        if any(is_expert(p) for p in module.parameters()) and dist_index.get_dp_group(is_expert_parallel=True) is None:
            raise ValueError("parameters have allreduce=False (experts): give their ranks as expt_device_mesh")
        self.strategy = strategy
        self.data_parallel_sharding_strategy = strategy.placements
        self.dist_index = dist_index
        self.mp_policy = mixed_precision_policy
        self.calculate_per_token_loss = calculate_per_token_loss
        self.report_nan_in_param_grad = report_nan_in_param_grad
        self.fsdp_unit_modules = list(classes_of(fsdp_unit_modules))
        self.device = device or device_of(dist_index.device_mesh)
        tell_of_options_without_effect(
            self.ddp_config,
            self.device,
            disable_bucketing=disable_bucketing,
            quantized=init_model_with_meta_device or any(is_quantized(p) for p in module.parameters()),
            groups={name: getattr(dist_index, name) for name in ("fsdp_group_ag", "expt_fsdp_group_ag")},
        )
        if device is not None and not init_model_with_meta_device:
            module.to(device)
        mixed_precision_policy.warn_of_low_gradients(module.parameters())
        scalars = {name: p for name, p in module.named_parameters() if p.ndim == 0}
        fine = enable_fine_grained_param_gather_hook or enable_fine_grained_param_gather_backward_hook
        self._states = shard_units(
            module,
            UnitOptions(
                index=dist_index,
                strategy=strategy,
                policy=mixed_precision_policy,
                unit_modules=tuple(self.fsdp_unit_modules),
                per_module=fine or self.ddp_config.megatron_fsdp_enable_fine_grained_param_gather,
                whole_modules=fine_grained_recurse_module_types or (),
                report_nan=report_nan_in_param_grad,
                sums=calculate_per_token_loss,
                ignored=set(scalars.values()),
            ),
        )
        self.module: Any = module
        if init_model_with_meta_device:
            initialize(module, self._states, dist_index, quantized.take_form)
        decoupled = self.ddp_config.megatron_fsdp_use_decoupled_grad
        self._scalars = ReplicatedScalars(
            {name: p for name, p in module.named_parameters() if name in scalars},
            dist_index,
            sums=calculate_per_token_loss,
            decoupled=decoupled,
        )
        discard_transposed_after_forward(self._states)
        # Weak, as gathered parameters have the attribute, too: Python's garbage collector does not see that the engine holds these.
        this_model = weakref.proxy(self)
        for p in module.parameters():
            p._megatron_fsdp_model = this_model
            p.__fsdp_param__ = True
            p.grad_added_to_main_grad = False
        self._fused_gradients = FusedGradients(self._states)
        self._gradients = MainGradients(self._states, decoupled=decoupled)
        self.param_and_grad_buffer = ParamAndGradBuffer(self)
        if self.ddp_config.megatron_fsdp_cuda_graph_mode:
            self.module.set_keep_unsharded_storage(True)
        engine_options = self._states[0].engine_options
        if self.ddp_config.nccl_ub and any(can_register(b) for state in self._states for b in state.mesh.backends):
            engine_options.buffers = RegisteredMemory(
                self._states[0].mesh.device,
                symmetric=not self.ddp_config.disable_symmetric_registration,
                manually=self.ddp_config.fsdp_manual_registration,
            )
        # With groups for gathers alone, gathers and reductions do not wait for each other. On Gloo they never do.
        if self.device.type != "cpu" and (dist_index.fsdp_group_ag is not None or dist_index.expt_fsdp_group_ag is not None):
            self.module.set_separate_reduce_scatter_group(True)
        engine_options.before_delivery, engine_options.after_backward = map(weak_method, (self._gradients.restore, self._end_backward))
        engine_options.overlaps_reductions = self.ddp_config.overlap_grad_reduce
        engine_options.prefetch_depth = self._prefetch_depth()
        self.microbatch_count = self._left_by_no_sync = 0
        self._is_last_microbatch = self._awaits_install = False
        self.set_model_auto_sync(sync_model_each_microbatch)

    def _prefetch_depth(self) -> int:
        """Returns the number of units that are gathered ahead; 0 if one unit alone exceeds the limit."""
        cap = self.ddp_config.suggested_communication_unit_size
        if not self.ddp_config.overlap_param_gather:
            return 0
        sizes = [sum(p.shape.numel() for p in state.parameters) for state in self._states[1:]]
        return 0 if cap is not None and any(size > cap for size in sizes) else 1

    # Synchronization.

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward is the last one before the optimizer steps. It has no effect under automatic synchronization."""
        return self._is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, last: bool) -> None:
        self._is_last_microbatch = last
        self._tell_engine()

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """With True, each backward reduces its gradients fully, and parameters have them when it ends."""
        self.model_auto_sync = sync_model
        self._tell_engine()

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Automatic synchronization, for the time of a ``with`` block."""
        before = self.model_auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """No microbatch is the last one, for the time of a ``with`` block.

        Strategies that shard gradients reduce them over the inner dimension nevertheless.
        """
        before = (self.model_auto_sync, self._is_last_microbatch)
        self.model_auto_sync, self._is_last_microbatch = False, False
        self._tell_engine()
        try:
            yield
        finally:
            self.model_auto_sync, self._is_last_microbatch, self._left_by_no_sync = *before, self.microbatch_count
            self._tell_engine()

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Sends gradients in another dtype within a ``with`` block of complete steps.

        Entering and leaving make new units, and copy the shards. Main parameters and gradients keep their dtypes.

        Args:
            mixed_precision_policy: a policy, of which only ``grad_comm_dtype`` counts.

        Raises:
            ValueError: with ``nccl_ub`` or ``cuda_graph_mode``, as buffers change.
            RuntimeError: while gradients are not reduced.
        """
        before = self.mp_policy
        self._set_policy(replace(before, grad_comm_dtype=mixed_precision_policy.grad_comm_dtype))
        try:
            yield
        finally:
            self._set_policy(before)

    def _set_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Sets the dtype in which gradients are sent."""
        if self.ddp_config.nccl_ub or self.ddp_config.megatron_fsdp_cuda_graph_mode:
            raise ValueError(
                "mixed_precision_context changes buffers, which nccl_ub and cuda_graph_mode keep: give grad_comm_dtype to "
                "fully_shard_model"
            )
        if self.microbatch_count > 0 or _C.inside_backward():
            raise RuntimeError(
                f"mixed_precision_context while gradients of {self.microbatch_count} microbatches are not reduced: enter and leave it "
                "between steps, or call finish_grad_sync() first"
            )
        self.mp_policy = policy
        for state in self._states:
            state.set_reduce_dtype(policy.reduce_dtype)
        self._tell_engine()

    def _tell_engine(self) -> None:
        fully = self.model_auto_sync or self._is_last_microbatch
        self._set_reductions(fully or self.strategy >= ShardingStrategy.OPTIM_GRADS, fully=fully)
        self._states[0].set_engine_options(is_last_backward=self.model_auto_sync)

    def _set_reductions(self, reduces: bool, *, fully: bool) -> None:
        for state in self._states:
            if state.unit is not None:
                state.unit.requires_gradient_sync = reduces
                state.unit.requires_all_reduce = fully

    def _end_backward(self) -> None:
        """Called when the engine has ended a backward."""
        self._fused_gradients.end_backward()
        self.microbatch_count += 1
        model = self._model
        if model is not None and model._finalization is not None:
            model.finish_finalization(model._finalization)  # This backward has waited for what start_grad_sync() began.
        if self.model_auto_sync:
            self._scalars.reduce()
            self._gradients.install()
            self.microbatch_count = self._left_by_no_sync = 0
        self._show_shards()

    def _show_shards(self) -> None:
        """Registers the shards on the modules, while unsharded parameters may stay gathered."""
        for state in self._states:
            if state.unit is not None:
                state.unit.hide()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduces the gradients that backwards have left, and waits. Each parameter has its gradient then. Collective.

        Args:
            force_all_reduce: an argument of Megatron-Core's DDP. All gradients are reduced in any case.

        Raises:
            RuntimeError: inside of a backward.
        """
        self._refuse_inside_backward("finish_grad_sync")
        model = self._model
        if model is not None:
            model.engine.finish_gradient_sync()  # Reductions over the inner ranks alone can then continue over the outer ones.
            self._set_reductions(True, fully=True)
            try:
                if model._finalization is not None:
                    model.finish_finalization(model._finalization)
                else:
                    model.finalize_backward(async_op=False)
            finally:
                self._tell_engine()
        self._scalars.reduce()
        self._gradients.install()
        self._show_shards()
        self.microbatch_count = self._left_by_no_sync = 0

    def start_grad_sync(self, *unused: Any) -> None:
        """Begins to reduce the gradients that backwards have left. Does nothing if reductions overlap, because they have begun already.

        Raises:
            Error: with ``check_for_nan_in_grad``, if a gradient has NaN or infinity, on all ranks. All are reduced then.
        """
        self._refuse_inside_backward("start_grad_sync")
        if self.ddp_config.check_for_nan_in_grad:
            self.finish_grad_sync()
            self._gradients.require_finite(self._scalars)
            return
        model = self._model
        if self.ddp_config.overlap_grad_reduce or model is None or model._finalization is not None:
            return
        model.engine.finish_gradient_sync()
        self._set_reductions(True, fully=True)
        try:
            model.finalize_backward(async_op=True)
        finally:
            self._tell_engine()

    def synchronize_gradient_reduce(self) -> None:
        """Waits for reductions that are under way. Gradients that are not to be reduced yet stay."""
        self._refuse_inside_backward("synchronize_gradient_reduce")
        if self._model is not None:
            self._model.engine.finish_gradient_sync()

    def attach_grad_to_optimizer_state(self) -> None:
        """Gives parameters their reduced gradients."""
        self.finish_grad_sync()

    def _refuse_inside_backward(self, method: str) -> None:
        if _C.inside_backward():
            raise RuntimeError(f"{method} cannot be called inside of a backward")

    @property
    def _model(self) -> Model | None:
        return self._states[0].model

    # Gradients.

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients. Gradients that are not reduced yet are reduced first."""
        if self.microbatch_count > 0:
            self.finish_grad_sync()
        self._gradients.scale(scaling_factor)
        self._scalars.scale(scaling_factor)

    def zero_grad_buffer(self, *, keep_tensors: bool = False) -> None:
        """Drops all gradients, also those that are not reduced.

        Args:
            keep_tensors: whether existing gradients stay, filled with zeros.
        """
        if self._model is not None:
            self._model.zero_gradients()
        keep = keep_tensors or self.ddp_config.megatron_fsdp_cuda_graph_mode
        self._gradients.zero(keep=keep)
        self._scalars.zero(keep=keep)
        self.microbatch_count = self._left_by_no_sync = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does the same as zero_grad_buffer."""
        self.zero_grad_buffer(keep_tensors=not set_to_none)

    # Parameters.

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gathers parameters before forward: the first unit, or all of them if gathers do not overlap.

        Args:
            unused: arguments of Megatron-Core's hooks.
            force_sync: gather all, and wait. ``parameters()`` are then unsharded, until a forward, a step or
                ``synchronize_param_gather()``.
            force_dispatch: an argument of Megatron-Core's DDP.
        """
        if self.strategy == ShardingStrategy.NO_SHARD:
            return
        units = [state for state in self._states if state.unit is not None]
        if not force_sync and self.ddp_config.overlap_param_gather:
            if self.ddp_config.fsdp_all_gather_in_start_param_sync and units:
                units[0].unshard(wait=False)
            return
        for state in units:
            state.unshard(wait=True)

    def synchronize_param_gather(self) -> None:
        """Frees unsharded parameters, so that ``parameters()`` are those of the optimizer."""
        for state in self._states:
            state.reshard()

    def install_optimized_model_weights(self) -> None:
        """Call it when the optimizer has written its weights. ``parameters()`` are these, and the next forward gathers them again."""
        self._awaits_install = False
        self._show_shards()
        if self._model is not None:
            self._model.engine.main_parameters_changed()

    def manual_buffer_registration(self) -> None:
        """Registers the buffers of collectives; see ``param_and_grad_buffer``."""
        self.param_and_grad_buffer.manual_buffer_registration()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Gives ranks that have the same piece of a parameter the values of the first of them. Collective."""
        self._show_shards()
        for state in self._states:
            mesh = state.mesh.mesh
            shards = 0 if state.options.is_replicated else 2 if state.options.outer_sharded else 1
            dims = range(mesh.ndim - shards)
            for parameter in state.parameters:
                for dim in dims:
                    group = mesh.get_group(dim)
                    dist.broadcast(local_of(parameter.sharded.data), src=dist.get_global_rank(group, 0), group=group)
        self._scalars.broadcast()
        self.install_optimized_model_weights()

    # The module.

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """The ranks."""
        return self.dist_index

    _replace_param_with_distributed_if_needed = _show_shards

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward.

        Raises:
            RuntimeError: after an optimizer's step with ``install_optimized_model_weights=False``, before these are installed.
        """
        if self._awaits_install:
            raise RuntimeError(
                "the optimizer has stepped with install_optimized_model_weights=False, and there is no copy of the older "
                "weights: call model.install_optimized_model_weights() before the next forward"
            )
        self._fused_gradients.forget()
        if torch.is_grad_enabled():
            self._gradients.restore()
        return self.module(*inputs, **kwargs)
