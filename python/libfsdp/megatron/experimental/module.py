"""Contexts, which modules that run together share, and the class that sharded modules get in addition to their own."""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from libfsdp._core.forward_hooks import tensors_with_gradient
from libfsdp._core.function_calls import untraced, weak_method
from libfsdp._fsdp2.fsdp_module import FSDPModule
from libfsdp.megatron._mixin import refuse_deepcopy
from libfsdp.megatron.experimental._ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from libfsdp.megatron._parameter_groups import ParameterGroup
    from libfsdp.megatron.experimental.placement import Strategy

__all__ = ["FsdpContext", "FsdpModule"]


class FsdpContext:
    """The state that modules which are sharded in one ``fully_shard_context`` share.

    Attributes:
        device: the device on which the modules compute; None before the first module.
        use_symmetric_memory: whether their gathers go into symmetric memory.
        ranges: the ranges of its modules that compute now.
        identities: the identities of all parameters of its modules.
    """

    def __init__(self, device: torch.device | None, *, use_symmetric_memory: bool = False) -> None:
        self.device = device
        self.use_symmetric_memory = use_symmetric_memory
        self.ranges = Ranges()
        self.identities: set[int] = set()
        # The references are weak, because modules refer to their context: an unused model must be freed at once.
        self._modules: list[weakref.ref[FsdpModule]] = []
        self._forward: list[weakref.ref[FsdpModule]] = []
        self._backward: list[weakref.ref[FsdpModule]] = []
        self._is_finalized = False
        self._is_last_microbatch = True

    @property
    def forward_order(self) -> tuple[FsdpModule, ...]:
        """The modules in forward order: roots in the order of their construction, each followed by the modules below it."""
        return _alive(self._forward)

    @property
    def backward_order(self) -> tuple[FsdpModule, ...]:
        """The modules in backward order: the last root first, each followed by the modules below it, the last child first."""
        return _alive(self._backward)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether backwards reduce gradients fully. With False, gradients that are Partial between microbatches wait for the last one."""
        return self._is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, last: bool) -> None:
        self._is_last_microbatch = last
        for module in _alive(self._modules):
            for state in module._states(recurse=False):
                if state.unit is not None:
                    state.unit.updated_after_backward = last
                    state.unit.requires_gradient_sync = last or not module._strategy.defers_all
                    state.unit.requires_all_reduce = last or not (
                        module._strategy.defers_all or module._strategy.defers_outer
                    )

    def register_module(self, module: FsdpModule) -> None:
        """Adds a module that has been sharded in this context.

        Raises:
            RuntimeError: if the context has been left.
        """
        if self._is_finalized:
            raise RuntimeError("a module can't join an FSDP context that was left: shard it within the context's block")
        self._modules.append(weakref.ref(module))

    def finalize(self) -> None:
        """Finds roots, names and orders, once all modules have been added."""
        modules = _alive(self._modules)
        below = {module: set(cast("nn.Module", module).modules()) - {module} for module in modules}
        for module in modules:
            module._enclosing = frozenset(id(outer) for outer in modules if module in below[outer])
        roots = [module for module in modules if not module._enclosing]
        for root in roots:
            names = {id(inner): name for name, inner in cast("nn.Module", root).named_modules()}
            for module in _fsdp_modules(root):
                module._is_root = module is root
                module._name = names[id(module)]
                self._forward.append(weakref.ref(module))
        for root in reversed(roots):
            self._backward.extend(weakref.ref(module) for module in _fsdp_modules(root, backwards=True))
        self._is_finalized = True

    def ensure_finalized(self) -> None:
        """Checks that the context was left.

        Raises:
            RuntimeError: if it was not.
        """
        if not self._is_finalized:
            raise RuntimeError(
                "modules of an FSDP context are not complete yet. Exit fully_shard_context before running them"
            )


class FsdpModule(FSDPModule):
    """The class that fully_shard gives a module in addition to its own. It has the methods of libfsdp.FSDPModule."""

    class Phase(enum.Enum):
        """The phase of a module.

        Its forward changes RESTING to FORWARD, and back. Backward changes RESTING to BACKWARD when it reaches the outputs, and back when it
        reaches a module that is not within this one, or ends. A forward that backward repeats does not change BACKWARD.
        """

        RESTING = enum.auto()
        FORWARD = enum.auto()
        BACKWARD = enum.auto()

    _class_prefix = "FsdpModule"
    _orig_cls_mro_index = 3
    __deepcopy__ = refuse_deepcopy

    _context: FsdpContext
    _strategy: Strategy
    _groups: tuple[ParameterGroup, ...]
    _phase: Phase
    _name: str | None
    _is_root: bool
    _enclosing: frozenset[int]

    def _join(self, context: FsdpContext, strategy: Strategy, groups: tuple[ParameterGroup, ...]) -> None:
        self._context, self._strategy, self._groups = context, strategy, groups
        self._phase, self._name, self._is_root, self._enclosing = self.Phase.RESTING, None, False, frozenset()
        context.register_module(self)
        module = cast("nn.Module", self)
        # This runs before libfsdp's own hook, which gathers, and the other one after libfsdp's own, which frees.
        module.register_forward_pre_hook(_pre_forward, prepend=True)
        module.register_forward_hook(_post_forward, always_call=True)
        module.register_load_state_dict_pre_hook(_refuse_assignment)

    @property
    def context(self) -> FsdpContext:
        """The context in which it was sharded."""
        return self._context

    @property
    def phase(self) -> Phase:
        """The present phase of the module."""
        return self._phase

    @property
    def name(self) -> str:
        """Its name in its root; that of the root is empty.

        Raises:
            RuntimeError: while its context is still open.
        """
        if self._name is None:
            raise RuntimeError("a module has its name when its fully_shard_context was left")
        return self._name

    def is_root(self) -> bool:
        """Whether no other module of its context contains it."""
        return self._is_root

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Its parameters, by dtype and by whether they are trained."""
        return self._groups

    @untraced
    def _begin_backward(self, gradient: torch.Tensor) -> None:
        """Called when backward has reached one of its outputs."""
        if self._phase is self.Phase.BACKWARD:
            return
        self._context.ranges.begin_backward(self.name, id(self), self._enclosing, self._end_backward)
        self._phase = self.Phase.BACKWARD

    def _end_backward(self) -> None:
        """Called when backward has left it."""
        self._phase = self.Phase.RESTING


@untraced
def _pre_forward(module: nn.Module, args: Any) -> None:
    fsdp_module = cast("FsdpModule", module)
    context, phases = fsdp_module._context, FsdpModule.Phase
    context.ensure_finalized()
    context.ranges.begin_forward(fsdp_module.name)
    if fsdp_module._phase is not phases.BACKWARD:
        fsdp_module._phase = phases.FORWARD


@untraced
def _post_forward(module: nn.Module, args: Any, output: Any) -> None:
    """Watches the outputs, through which backward will reach the module."""
    fsdp_module = cast("FsdpModule", module)
    context, phases = fsdp_module._context, FsdpModule.Phase
    if not context._is_finalized:
        return
    if fsdp_module._phase is phases.FORWARD:
        fsdp_module._phase = phases.RESTING
    context.ranges.end_forward()
    if torch.is_grad_enabled():
        begin = weak_method(fsdp_module._begin_backward)
        for tensor in tensors_with_gradient(output):
            tensor.register_hook(begin)


def _refuse_assignment(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace sharded parameters: load before fully_shard, or without assign"
        )


def _alive(references: Iterable[weakref.ref[FsdpModule]]) -> tuple[FsdpModule, ...]:
    return tuple(module for reference in references if (module := reference()) is not None)


def _fsdp_modules(module: Any, *, backwards: bool = False) -> Iterator[FsdpModule]:
    """Yields the sharded modules in and below a module, enclosing ones first."""
    if isinstance(module, FsdpModule):
        yield module
    children = list(cast("nn.Module", module).children())
    for child in reversed(children) if backwards else children:
        yield from _fsdp_modules(child, backwards=backwards)
