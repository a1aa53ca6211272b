"""The eager engine by its protocol, in a plain loop without a Trainer; torch's GradScaler is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp import LossScaling, PrecisionPolicy
from lightning_mp.engines.eager import EagerEngine
from lightning_mp.errors import Faults
from lightning_mp.numerics.loss_scale import LossScaler
from support.models import InfiniteGradient, same_weights, weights

OPTIMIZERS: dict[str, Any] = {
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "plain": partial(torch.optim.AdamW, lr=1e-2),
}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _loss(net: nn.Module, step: int, bad: tuple[int, ...] = ()) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    return loss + InfiniteGradient.apply(next(net.parameters()).sum() * 0) if step in bad else loss


def _bare(policy: PrecisionPolicy) -> EagerEngine:
    scaler = LossScaler(policy.loss_scaling)
    return EagerEngine(
        policy,
        device=torch.device("cpu"),
        scaler=scaler,
        distributed=False,
        global_step=lambda: scaler.attempts - 1,
    )


def _engine(net: nn.Module, precision: str = "16-mixed", build: Any = OPTIMIZERS["fused"], **fields: Any) -> Any:
    policy = PrecisionPolicy(precision=precision, **fields)
    engine = _bare(policy)
    faults = Faults()
    engine.check(net, faults)
    faults.raise_if_any()
    engine.prepare(net)
    optimizer = build(net.parameters())
    engine.connect(net, [optimizer])
    return engine, optimizer


def _step(engine: Any, optimizer: Any, loss: Tensor, clip: float | None = None) -> None:
    optimizer.zero_grad()
    engine.before_backward(loss).backward()
    engine.after_backward()
    engine.unscale(optimizer)
    if clip is not None:
        engine.clip_norm(optimizer, clip)
    engine.step(optimizer)
    engine.finish_step(None)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [(), (0,), (2, 3)])
def test_a_loop_with_the_engine_is_a_loop_with_torchs_scaler(bad: tuple[int, ...], clip: float | None) -> None:
    ours, torchs = _net(), _net()
    rule = LossScaling.torch(init_scale=8.0, growth_interval=2)
    engine, optimizer = _engine(ours, build=OPTIMIZERS["plain"], loss_scaling=rule)
    oracle, scaler = OPTIMIZERS["plain"](torchs.parameters()), torch.amp.GradScaler("cpu", 8.0, growth_interval=2)
    for number in range(6):
        _step(engine, optimizer, _loss(ours, number, bad), clip)
        oracle.zero_grad()
        scaler.scale(_loss(torchs, number, bad)).backward()
        scaler.unscale_(oracle)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(torchs.parameters(), clip)
        scaler.step(oracle)
        scaler.update()
        assert same_weights(weights(ours), weights(torchs))
        assert engine.scaler.get_scale() == scaler.get_scale()
        assert engine.scaler.step_skipped == (number in bad)
    assert (engine.scaler.applied_steps, engine.scaler.skipped_steps) == (6 - len(bad), len(bad))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_without_a_scale_the_loss_is_untouched_and_skips_are_the_same(precision: str, optimizer: str) -> None:
    net = _net()
    engine, opt = _engine(net, precision, OPTIMIZERS[optimizer])
    loss = _loss(net, 0)
    assert engine.before_backward(loss) is loss
    for number in range(4):
        before = weights(net)
        _step(engine, opt, _loss(net, number, (2,)))
        assert same_weights(before, weights(net)) == (number == 2)


# ---------------------------------------------------------------------- what goes over the wire, in a group of one

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_gradients_keep_their_own_dtype_and_the_wires_rounding(stored: str, wire: str, monkeypatch: Any) -> None:
    """Two processes are in tests/plan/test_ddp_gloo.py."""
    net, hooked = nn.Linear(3, 1, bias=False, dtype=DTYPES[stored]), list[object]()
    wrapped = DistributedDataParallel(net)
    register = DistributedDataParallel.register_comm_hook
    monkeypatch.setattr(
        DistributedDataParallel, "register_comm_hook", lambda *given: hooked.append(given) or register(*given)
    )
    engine = _bare(PrecisionPolicy(precision="32-true", reduce_dtype=wire))
    engine.connect(wrapped, [])
    assert len(hooked) == (stored != wire), "a hook only where the dtypes differ"
    x = torch.tensor([[1.0, 1 / 3, 3.14159]], dtype=DTYPES[stored])
    wrapped(x).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == DTYPES[stored]
    assert torch.equal(net.weight.grad, x.to(DTYPES[wire]).to(DTYPES[stored]))
