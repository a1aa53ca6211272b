"""The loss scaler against ``torch.amp.GradScaler`` on real training, and where it goes beyond it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_mp import LossScaling
from lightning_mp.numerics.loss_scale import LossScaler, adjust, init
from support.loops import INF, backward, net, train
from support.models import same_weights, weights
from support.optimizers import ScalerAware
from support.scales import scalings, traces

quick = settings(max_examples=30)


@pytest.mark.parametrize(
    ("setter", "value", "trace", "expected"),
    [
        ("set_growth_factor", 4.0, [False], 32.0),
        ("set_backoff_factor", 0.25, [True], 2.0),
        ("set_growth_interval", 2, [False, False], 16.0),
    ],
)
def test_torchs_setters_change_the_rule_that_runs(setter: str, value: Any, trace: list[bool], expected: float) -> None:
    options = {"init_scale": 8.0, "growth_interval": 1}
    for scaler in (GradScaler("cpu", **options), LossScaler(LossScaling.torch(**options))):
        getattr(scaler, setter)(value)
        model = net()
        assert train(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, trace)[-1] == expected


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_an_optimizer_that_knows_of_scalers_steps_as_under_torchs_own() -> None:
    """Which leaves dividing and skipping to it; here it is given true gradients, or is not called."""
    ended = []
    for scaler in (GradScaler("cpu", init_scale=8.0), LossScaler(LossScaling.torch(init_scale=8.0))):
        model = net()
        scales = train(model, ScalerAware(model.parameters()), scaler, [False, True, False])
        ended.append((weights(model), scales))
    (stock, stock_scales), (ours, our_scales) = ended
    assert same_weights(stock, ours)
    assert stock_scales == our_scales == [8.0, 4.0, 4.0]


@quick
@given(config=scalings(), trace=traces)
def test_the_scaler_follows_the_pure_rule(config: LossScaling, trace: list[bool]) -> None:
    scaler, state = LossScaler(config), init(config, "cpu")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in trace:
        parameter.grad = torch.tensor([INF if overflow else 0.0])
        scaler.step(optimizer)
        scaler.update()
        state = adjust(config, state, overflow)
        saved = scaler.state_dict()
        assert (saved["scale"], saved["_growth_tracker"]) == (state.scale.item(), state.growth_tracker.item())
        assert saved["hysteresis_left"] == state.hysteresis_left.item()
        if config.at_min == "raise":
            assert scaler.overflowed_at_min == state.overflowed_at_min.item()


@quick
@given(config=scalings(), trace=traces.filter(bool), split=st.integers(0, 100))
def test_a_resumed_scaler_goes_on_as_if_nothing_had_happened(
    config: LossScaling, trace: list[bool], split: int
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)

    def run(scaler: LossScaler, part: list[bool]) -> dict[str, Any]:
        for overflow in part:
            parameter.grad = torch.tensor([INF if overflow else 0.0])
            scaler.step(optimizer)
            scaler.update()
        return scaler.state_dict()

    straight, first, second = LossScaler(config), LossScaler(config), LossScaler(config)
    split = min(split, len(trace))
    second.load_state_dict(run(first, trace[:split]))
    run(straight, trace[:split])
    assert run(second, trace[split:]) == run(straight, trace[split:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_half_loss_is_scaled_in_fp32(dtype: torch.dtype) -> None:
    loss = torch.tensor(1.5, dtype=dtype, requires_grad=True)
    scaled = LossScaler(LossScaling(init_scale=2.0**20)).scale(loss)
    assert scaled.item() == 1.5 * 2**20
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert scaled.requires_grad


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_are_unscaled_after_their_repeated_entries_are_added_up(bad: bool) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    scaler = LossScaler(LossScaling(init_scale=4))
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    if bad:  # each entry is finite, their sum is not
        table.weight.grad._values().fill_(3e38)
    scaler.step(optimizer)
    assert scaler.step_skipped == bad
    if not bad:
        assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("bad", [False, True])
def test_complex_gradients_are_unscaled(bad: bool) -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(LossScaling(init_scale=4))
    scaler.scale(weight.abs().pow(2).sum()).backward()
    if bad:
        weight.grad.imag[0] = INF
    scaler.step(optimizer)
    assert scaler.step_skipped == bad
    torch.testing.assert_close(weight.detach(), torch.tensor([1 + 2j if bad else -1 - 2j]))


def test_the_flag_is_reduced_once_for_each_optimizer() -> None:
    calls = []

    def another_rank_overflowed(flag: Tensor) -> None:
        calls.append(flag.item())
        flag.fill_(1.0)

    model, scaler = net(), LossScaler(LossScaling(init_scale=8))
    scaler.sync = another_rank_overflowed
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), weights(model)
    backward(model, scaler, 0, overflow=False)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert calls == [0.0]
    assert same_weights(weights(model), before)
    assert scaler.get_scale() == 4


def test_a_parameter_of_two_optimizers_is_divided_once() -> None:
    model, plain, scaler = net(), net(), LossScaler(LossScaling(init_scale=2.0**10, growth_interval=1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, model[2])]
    for step in range(2):
        backward(plain, LossScaler(LossScaling.static(1)), step, overflow=False)
        scaler.multiply_back_()
        backward(model, scaler, step, overflow=False)
        scaler.divide_(optimizers)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
