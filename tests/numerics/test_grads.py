"""Gradients of one optimizer: one pass that unscales and checks, a norm that does not overflow, a step held back."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_mp.numerics import grads
from lightning_mp.numerics.grads import clip_grad_norm_, step_unless, takes_flag, unscale_and_check_
from support.loops import INF, net
from support.models import same_weights, weights
from support.optimizers import CLAIM_TO_SKIP, Renamed

pytestmark = pytest.mark.older_cpu
NAN = float("nan")


def random_gradients(seed: int, *dtypes: torch.dtype, factor: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for dtype in dtypes:
        one = nn.Parameter(torch.zeros(4, 5, dtype=dtype))
        one.grad = (torch.randn(4, 5, generator=generator) * factor).to(dtype)
        made.append(one)
    return made


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_an_inverse_scale_of_1_keeps_every_bit(values: list[float], dtype: torch.dtype) -> None:
    gradient = torch.tensor(values, dtype=dtype)
    before, found = gradient.clone(), torch.zeros(())
    unscale_and_check_([gradient], torch.ones(()), found)
    assert found.item() == (not bool(torch.isfinite(before).all()))
    assert torch.equal(gradient.view(torch.uint8), before.view(torch.uint8)) or before.isnan().any()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_bad_value_in_any_gradient_of_any_dtype_is_found(where: int, bad: float) -> None:
    members = [torch.ones(3), torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)]
    members[where][1] = bad
    found = torch.zeros(())
    unscale_and_check_(members, torch.tensor(0.25), found)
    assert found.item() == 1
    assert [member[0].item() for member in members] == [0.25] * 3


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), count=st.integers(0, 4), max_norm=st.floats(0.0, 20.0), power=st.integers(-20, 20))
def test_clipping_fp32_gradients_is_torchs_bit_for_bit(seed: int, count: int, max_norm: float, power: int) -> None:
    ours, theirs = (random_gradients(seed, *[torch.float32] * count, factor=2.0**power) for _ in range(2))
    norm, expected = clip_grad_norm_(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, expected)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtypes", [(HALF,), (BRAIN,), (HALF, SINGLE), (BRAIN, HALF, SINGLE), (DOUBLE, SINGLE), (DOUBLE, HALF)], ids=str
)
def test_the_norm_over_mixed_dtypes_is_that_of_the_same_numbers_in_fp64(dtypes: tuple[torch.dtype, ...]) -> None:
    members = random_gradients(3, *dtypes)
    exact = torch.cat([member.grad.double().flatten() for member in members]).norm()
    before = [member.grad.double().clone() for member in members]
    norm = clip_grad_norm_(members, 1.0)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    for member, gradient, dtype in zip(members, before, dtypes, strict=True):
        assert member.grad.dtype == dtype
        torch.testing.assert_close(member.grad.double(), gradient / exact, rtol=1e-2, atol=1e-6)


def test_a_norm_beyond_fp16_of_fp16_gradients_is_finite_and_clips_to_what_was_asked() -> None:
    members = random_gradients(5, HALF, HALF, factor=15_000.0)
    exact = torch.cat([member.grad.double().flatten() for member in members]).norm()
    assert exact > torch.finfo(HALF).max
    stock = random_gradients(5, HALF, HALF, factor=15_000.0)
    assert clip_grad_norm_(members, 2.0).item() == pytest.approx(exact.item(), rel=1e-5)
    clipped = torch.cat([member.grad.double().flatten() for member in members]).norm().item()
    assert clipped == pytest.approx(2.0, rel=1e-2)
    assert nn.utils.clip_grad_norm_(stock, 2.0).isinf(), "torch's own norm overflows: when it does not, use it"


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "SGD"])
@pytest.mark.parametrize("overflow", [True, False])
def test_a_flag_on_another_device_is_read_before_the_step(overflow: bool, name: str) -> None:
    """A fused optimizer would copy it to the CPU without waiting for it."""
    model, asked = net(), []
    optimizer, before = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True), weights(model)
    for member in model.parameters():
        member.grad = torch.ones_like(member)
    step_unless(optimizer, torch.zeros((), device="meta"), lambda flag: asked.append(flag.device.type) or overflow)
    assert asked == ["meta"]
    assert same_weights(weights(model), before) is overflow


def _scheduled(parameters: Any) -> torch.optim.Optimizer:
    """A scheduler puts a wrapper of its own around ``step``, on the instance."""
    optimizer = torch.optim.AdamW(parameters, fused=True)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("build", "takes"),
    [
        (partial(torch.optim.SGD, lr=0.1, fused=True), True),
        (partial(Renamed, fused=True), True),
        (_scheduled, True),
        (torch.optim.AdamW, False),
        *((build, False) for build in CLAIM_TO_SKIP.values()),
    ],
)
def test_only_torchs_fused_optimizers_are_left_to_skip_on_the_device(build: Any, takes: bool) -> None:
    assert takes_flag(build(net().parameters())) is takes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.3e38, None])
def test_bf16_is_checked_without_torchs_kernel_as_with_it(bad: float | None) -> None:
    """On CUDA that kernel takes no bf16 (pytorch/pytorch issue 127176): the largest magnitude tells the same."""
    members = [torch.arange(1.0, 7.0, dtype=BRAIN), torch.full((3, 2), -2.5, dtype=BRAIN)]
    if bad is not None:
        members[1][2, 1] = bad
    flag, flag_of_torch = torch.zeros(()), torch.zeros(())
    grads._check_by_norm_(members, flag)
    torch._amp_foreach_non_finite_check_and_unscale_(members, flag_of_torch, torch.ones(()))
    assert flag == flag_of_torch == float(bad is not None and not math.isfinite(torch.tensor(bad).bfloat16().item()))
