"""The methods of FSDPModule, and the arguments of fully_shard, each by what it changes: gathers, dtypes, values, what modules show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.collectives import reduce_scatter
from support.marks import on_ranks
from support.training import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method, share_comm_ctx

BLOCKS = 4
UNITS = BLOCKS + 1


class Block(nn.Module):
    """Notes the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return torch.tanh(self.layer(x.to(self.layer.weight.dtype)))

    def encode(self, x: Tensor) -> Tensor:
        """Another way to use the parameters."""
        return 2 * self.layer(x)


class Net(nn.Module):
    """Blocks, and a head that is the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net().to(device.TYPE)


def sharded_net(**options: Any) -> Any:
    model = plain_net()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(number: int = 0) -> Tensor:
    """This rank's own."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())).to(device.TYPE)


def whole_gradients(model: nn.Module) -> list[Tensor]:
    return [full(p.grad) for p in model.parameters() if isinstance(p, DTensor)]


def backward(model: Any, number: int = 0) -> list[Tensor]:
    """Gradients of a step, whole."""
    model(batch(number)).square().sum().backward()
    return whole_gradients(model)


def gathers(model: Any) -> int:
    return libfsdp.wire_stats(model)["all_gathers"]


def shows_shards(module: nn.Module) -> bool:
    return all(isinstance(p, DTensor) for p in module.parameters())


def gathers_inside(model: Any) -> dict[str, int]:
    """Gathers of a first step, which knows no order, that have begun when it is in a block. In the last one, forward has begun all."""
    seen: dict[str, int] = {}
    for i, block in enumerate(model.blocks):
        block.layer.register_forward_pre_hook(lambda *_, i=i: seen.update({f"forward {i}": gathers(model)}))
        block.layer.register_full_backward_hook(lambda *_, i=i: seen.update({f"backward {i}": gathers(model)}))
    backward(model)
    before = seen[f"forward {BLOCKS - 1}"] - UNITS  # of other models on the same mesh
    return {moment: count - before for moment, count in seen.items()}


@on_ranks(2)
def test_prefetch_lists() -> None:
    listed = sharded_net()
    listed.blocks[0].set_modules_to_forward_prefetch([listed.blocks[1], listed.blocks[2]])
    listed.blocks[3].set_modules_to_backward_prefetch([listed.blocks[2], listed.blocks[1]])
    ahead, as_entered = gathers_inside(listed), gathers_inside(sharded_net())
    assert [as_entered[f"forward {i}"] for i in range(BLOCKS)] == [2, 3, 4, 5]
    assert [ahead[f"forward {i}"] for i in range(BLOCKS)] == [4, 4, 4, 5]
    # The last block is still whole in backward.
    assert as_entered["backward 3"] == UNITS
    assert ahead["backward 3"] == UNITS + 2
    with pytest.raises(ValueError, match="FSDPModule"):
        listed.blocks[0].set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@on_ranks(2)
def test_resharding() -> None:
    kept, freed = sharded_net(), sharded_net()
    kept.set_reshard_after_backward(False)
    for model, expected in ((kept, 0), (freed, UNITS)):
        backward(model)
        before = gathers(model)
        model(batch())
        assert gathers(model) - before == expected
    model = sharded_net()
    model.set_reshard_after_forward(False)
    output = model(batch())
    before = gathers(model)
    output.sum().backward()
    assert gathers(model) == before
    with pytest.raises(ValueError, match="bool"):
        model.set_reshard_after_forward(2)


@on_ranks(2)
def test_what_modules_show() -> None:
    for options in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
        model = sharded_net(**options)
        output = model(batch())
        # The root's parameters stay whole unless it was told, too; those of blocks only if they were told so.
        assert shows_shards(model.head) == (options == {"reshard_after_forward": True})
        assert all(shows_shards(block) == (options != {"reshard_after_forward": False}) for block in model.blocks)
        output.sum().backward()
        assert shows_shards(model)


@on_ranks(2)
def test_unsharding() -> None:
    model = sharded_net()
    expected = backward(model)
    model.zero_grad()
    before = gathers(model)
    handle = model.blocks[1].unshard(async_op=True)
    assert shows_shards(model.blocks[1])
    handle.wait()
    assert gathers(model) - before == 1
    assert not any(isinstance(p, DTensor) for p in model.blocks[1].parameters())
    assert torch.equal(model.blocks[1].layer.weight, plain_net().blocks[1].layer.weight)
    model.blocks[2].unshard()
    model.blocks[2].reshard()
    assert shows_shards(model.blocks[2])
    # What is there already is not gathered again.
    before = gathers(model)
    output = model(batch())
    assert gathers(model) - before == UNITS - 1
    output.square().sum().backward()
    assert all(map(torch.equal, whole_gradients(model), expected))


@on_ranks(2)
def test_without_values_in_backward() -> None:
    model, as_usual = sharded_net(), sharded_net()
    model.blocks[0].set_unshard_in_backward(False)
    counts = []
    for one in (model, as_usual):
        output = one(batch())
        # Of block 0, backward needs no values where its input has no gradient.
        before = gathers(one)
        output.square().sum().backward()
        counts.append(gathers(one) - before)
    assert counts == [BLOCKS - 2, BLOCKS - 1]
    assert all(map(torch.equal, whole_gradients(model), whole_gradients(as_usual)))


@on_ranks(2)
def test_evaluation() -> None:
    model = sharded_net()
    backward(model)
    with torch.no_grad():
        model(batch())
    # The root goes, too: no backward needs it, and the next forward gathers it anew.
    assert all(shows_shards(unit) for unit in (model, *model.blocks))
    assert libfsdp.memory_stats(model)["gathered_parameters.live"] == 0


@on_ranks(2)
def test_custom_reductions() -> None:
    expected = backward(sharded_net())
    model, calls = sharded_net(), []

    class Reduce:
        """As FSDP2's ReduceScatter."""

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            calls.append(input_tensor.numel() // output_tensor.numel())
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    model.blocks[0].set_custom_reduce_scatter(Reduce())
    assert all(map(torch.equal, backward(model), expected))
    assert calls == [dist.get_world_size()]


@on_ranks(2)
def test_custom_reductions_add_up_in_reduce_dtype() -> None:
    """They add up in the dtype that they get: gradients that are computed in bf16 are converted first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = backward(sharded_net(mp_policy=policy))
    model, dtypes = sharded_net(mp_policy=policy), []

    class Reduce:
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            dtypes.append(input_tensor.dtype)
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    model.blocks[0].set_custom_reduce_scatter(Reduce())
    assert all(map(torch.equal, backward(model), expected))
    assert dtypes == [torch.float32]


@on_ranks(2)
def test_factors_and_buffers() -> None:
    expected = backward(sharded_net())
    model = sharded_net()
    for module in (model, *model.blocks):
        module.set_reduce_scatter_divide_factor(8.0)
    assert all(torch.equal(4 * ours, theirs) for ours, theirs in zip(backward(model), expected, strict=True))
    for wrong in (True, 1.5, "2"):
        with pytest.raises(TypeError):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="positive"):
        model.set_reduce_scatter_max_input_buffers(0)
    model.set_reduce_scatter_max_input_buffers(1)


@on_ranks(2)
def test_resetting() -> None:
    model = sharded_net()
    expected = backward(model)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()
    loss = model(batch(1)).square().sum()  # and no backward
    assert loss.isfinite()
    model.reset_iter_state()
    assert libfsdp.memory_stats(model)["gathered_parameters.live"] == 0
    assert shows_shards(model)
    assert all(map(torch.equal, backward(model), expected))


@on_ranks(2)
def test_forward_methods() -> None:
    model = sharded_net()
    model(batch())
    x = batch()
    block, plain = model.blocks[0], plain_net().blocks[0]
    register_fsdp_forward_method(block, "encode")
    assert torch.equal(block.encode(x), plain.encode(x))
    assert shows_shards(block)
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing happens
    with pytest.raises(ValueError, match="decode"):
        register_fsdp_forward_method(block, "decode")


@on_ranks(2)
def test_contexts_of_communication() -> None:
    model = sharded_net()
    share_comm_ctx([model, *model.blocks])
    with pytest.raises(ValueError, match="Linear"):
        share_comm_ctx([model, nn.Linear(2, 2)])


@on_ranks(2)
def test_ignored_parameters() -> None:
    model: Any = plain_net()
    own = model.head.bias
    ignored = {own, model.blocks[0].layer.bias}
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert model.head.bias is own
    assert not isinstance(model.blocks[0].layer.bias, DTensor)
    plain = plain_net()
    plain(batch()).square().sum().backward()
    backward(model)
    # This rank's gradients alone.
    assert torch.equal(own.grad, plain.head.bias.grad)
    assert isinstance(model.head.weight, DTensor)


@on_ranks(2)
def test_dtypes() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    cast = sharded_net(mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    assert cast(batch()).dtype == bf16
    assert [block.seen for block in cast.blocks] == [[bf16]] * BLOCKS
    as_given = sharded_net(mp_policy=MixedPrecisionPolicy(param_dtype=bf16, cast_forward_inputs=False))
    as_given.blocks[0](batch())
    assert as_given.blocks[0].seen == [fp32]
    given_back: Any = plain_net()
    for block in given_back.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    fully_shard(given_back, mp_policy=MixedPrecisionPolicy(param_dtype=bf16, output_dtype=fp32))
    assert given_back(batch()).dtype == fp32
    assert [block.seen for block in given_back.blocks] == [[bf16]] * BLOCKS


@on_ranks(2)
def test_copies_and_slices() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    assert type(model).__mro__[1:3] == (libfsdp.FSDPModule, nn.Sequential)
    assert type(model[1:]) is nn.Sequential
    assert len(model[1:]) == 2
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)


@on_ranks(2)
def test_optimizer_events() -> None:
    waited: list[Any] = []

    class Stream:
        """Notes what it waits for."""

        def wait_event(self, event: Any) -> None:
            waited.append(event)

    model = sharded_net()
    event: Any = object()
    model.set_post_optim_event(event)
    streams = torch.get_device_module(device.TYPE)
    before, streams.current_stream = streams.current_stream, lambda *_: Stream()
    try:
        for _ in range(2):
            model(batch())
    finally:
        streams.current_stream = before
    assert waited == [event]


@on_ranks(4)
def test_replicas_are_added_up_once() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("replicate", "shard"))

    def accumulate(*, always: bool) -> tuple[list[Tensor], list[int]]:
        model = sharded_net(mesh=mesh)
        sent = []  # in gathers: of sums, between replicas
        for number, last in ((0, False), (1, True)):
            model.set_requires_all_reduce(last or always)
            output = model(batch(number)).square().sum()
            before = libfsdp.wire_stats(model)["all_gather_bytes"]
            output.backward()
            sent.append(libfsdp.wire_stats(model)["all_gather_bytes"] - before)
        return whole_gradients(model), sent

    once, sent = accumulate(always=False)
    twice, sent_always = accumulate(always=True)
    for ours, theirs in zip(once, twice, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sent[0] < sent_always[0]
    assert sent[1] == sent_always[1]
