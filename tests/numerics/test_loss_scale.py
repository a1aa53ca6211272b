"""The loss-scale rule as a table, and against the three systems it reproduces."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mp import LossScaling
from lightning_mp.numerics.loss_scale import LossScaleState, adjust, init
from support.scales import FP32_MAX, backoffs, growths, scales, scalings, traces

quick = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def numbers(state: LossScaleState) -> tuple[float, ...]:
    """A state's four fields as Python numbers, wherever they live."""
    return tuple(value.item() if isinstance(value, Tensor) else value for value in astuple(state))


def run(config: LossScaling, trace: str | list[bool], device: str | None = None) -> list[LossScaleState]:
    """The state after each step; in a string ``!`` is an overflow and ``.`` a clean step."""
    state, states = init(config, device), []
    for found in trace:
        state = adjust(config, state, found in ("!", True))
        states.append(state)
    return states


THREE_QUARTERS = 3 * 2.0**126  # of fp32's range
LARGEST = 2.0**127  # the largest power of two in fp32
TABLE: list[tuple[str, LossScaling, str, list[float]]] = [
    ("grows after growth_interval", LossScaling(init_scale=8, growth_interval=2), "....", [8, 16, 16, 32]),
    ("an overflow backs off at once", LossScaling(init_scale=8), "!.!", [4, 4, 2]),
    ("an overflow restarts the interval", LossScaling(init_scale=8, growth_interval=2), ".!..", [8, 4, 4, 8]),
    ("the floor of 1 is held", LossScaling(init_scale=4), "!!!!", [2, 1, 1, 1]),
    ("it grows again from the floor", LossScaling(init_scale=1, growth_interval=1), "!!..", [1, 1, 2, 4]),
    ("the ceiling", LossScaling(init_scale=8, growth_interval=1, max_scale=20), "...!.", [16, 20, 20, 10, 20]),
    ("factors", LossScaling(init_scale=100, growth_factor=4, backoff_factor=0.25, growth_interval=1), "!.", [25, 100]),
    ("hysteresis", LossScaling(init_scale=8, hysteresis=3), "!!!!", [8, 8, 4, 2]),
    ("clean steps do not refill it", LossScaling(init_scale=8, hysteresis=2), "!.!.!", [8, 8, 4, 4, 2]),
    (
        "unless it is consecutive",
        LossScaling(init_scale=8, hysteresis=2, consecutive_hysteresis=True),
        "!.!.!!",
        [8, 8, 8, 8, 8, 4],
    ),
    ("a growth refills it", LossScaling(init_scale=8, hysteresis=2, growth_interval=2), "!..!!", [8, 8, 16, 16, 8]),
    (
        "growth_delay comes before the first growth, and after an overflow",
        LossScaling(init_scale=8, growth_interval=2, growth_delay=1),
        ".....!.....",
        [8, 8, 16, 16, 32, 16, 16, 16, 32, 32, 64],
    ),
    ("a static scale stays", LossScaling.static(128), "!.!!.", [128] * 5),
    (
        "a growth past fp32's end ends at the ceiling",
        LossScaling(init_scale=LARGEST, growth_interval=1, max_scale=THREE_QUARTERS),
        ".",
        [THREE_QUARTERS],
    ),
]


@pytest.mark.parametrize("device", [None, "cpu"], ids=["numbers", "tensors"])
@pytest.mark.parametrize(("config", "trace", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_scale_follows_the_rule(config: LossScaling, trace: str, expected: list[float], device: str | None) -> None:
    assert [numbers(state)[0] for state in run(config, trace, device)] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("config", "trace", "flags"),
    [
        (LossScaling(init_scale=2), "!!!.!", [False, True, True, False, True]),
        (LossScaling(init_scale=1, hysteresis=2), "!!.!", [False, True, False, True]),
        (LossScaling.static(8), ".!", [False, True]),
        (LossScaling.torch(init_scale=1), "!", [False]),
    ],
    ids=["at the floor", "not while hysteresis is left", "a static scale is its own floor", "no floor"],
)
@pytest.mark.parametrize("device", [None, "cpu"], ids=["numbers", "tensors"])
def test_an_overflow_at_the_floor_is_told(
    config: LossScaling, trace: str, flags: list[bool], device: str | None
) -> None:
    assert [numbers(state)[3] for state in run(config, trace, device)] == flags


@quick
@given(config=scalings(), trace=traces)
@example(config=LossScaling(init_scale=2.0**127, growth_interval=1, max_scale=THREE_QUARTERS), trace=[False] * 3)
def test_numbers_and_tensors_are_the_same_rule_between_its_bounds(config: LossScaling, trace: list[bool]) -> None:
    ceiling = FP32_MAX if config.max_scale is None else config.max_scale
    beyond = False  # numbers may go beyond fp32, tensors cannot
    for host, device in zip(run(config, trace), run(config, trace, "cpu"), strict=True):
        beyond |= host.scale > FP32_MAX
        scale, growth_tracker, hysteresis_left, _ = found = numbers(device)
        assert beyond or numbers(host) == found
        assert config.floor <= scale <= ceiling
        assert 1 <= hysteresis_left <= config.hysteresis
        assert -config.growth_delay <= growth_tracker < config.growth_interval


@quick
@given(init_scale=scales, growth=growths, backoff=backoffs, interval=st.integers(1, 4), trace=traces)
@example(init_scale=1.0, growth=2.0, backoff=0.3, interval=3, trace=[True] * 120)  # down to 0, where it stays
@example(init_scale=2.0**126, growth=1.1, backoff=0.5, interval=1, trace=[False] * 12)
def test_torch_is_the_sequence_of_amp_update_scale(
    init_scale: float, growth: float, backoff: float, interval: int, trace: list[bool]
) -> None:
    config = LossScaling.torch(init_scale, growth, backoff, interval)
    scale, tracker = torch.full((1,), init_scale), torch.zeros(1, dtype=torch.int32)
    states = zip(trace, run(config, trace), run(config, trace, "cpu"), strict=True)
    for found, host, device in states:
        torch._amp_update_scale_(scale, tracker, torch.tensor([float(found)]), growth, backoff, interval)
        assert numbers(device)[:2] == (scale.item(), tracker.item())
        assert numbers(host)[:2] == (scale.item(), tracker.item())


@pytest.fixture(scope="module")
def dynamic_loss_scaler() -> Iterator[Callable[..., Any]]:
    """DeepSpeed's class. It asks its backend for the rank (rank 0 logs), so there is one that knows only that.

    ``deepspeed.init_distributed`` would compile a C++ collective first, a minute of it, for the same answer.
    """
    from deepspeed.comm import comm
    from deepspeed.comm.backend import Backend
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.utils import logger

    class OneProcess(Backend):
        def get_rank(self, group: Any = None) -> int:
            return 0

    backend = OneProcess(name="one process")
    backend.init_process_group()
    before, level, comm.cdb = comm.cdb, logger.level, backend
    logger.setLevel("ERROR")
    yield DynamicLossScaler
    comm.cdb = before
    logger.setLevel(level)


@quick
@given(
    power=st.integers(0, 20),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.25, 1, 1.0, 0.75]),
    at_min=st.sampled_from(["raise", "hold"]),
    trace=traces,
)
def test_deepspeed_is_the_sequence_of_its_dynamic_loss_scaler(
    dynamic_loss_scaler: Any,
    power: int,
    window: int,
    hysteresis: int,
    consecutive: bool,
    minimum: float,
    at_min: Any,
    trace: list[bool],
) -> None:
    config = LossScaling.deepspeed(0, power, window, hysteresis, consecutive, minimum, at_min)
    theirs = dynamic_loss_scaler(2.0**power, window, minimum, hysteresis, consecutive, at_min == "raise")
    host, device = init(config), init(config, "cpu")
    beyond = False  # DeepSpeed's scale is a Python number and goes on past fp32, where a device's stays behind
    for found in trace:
        host, device = adjust(config, host, found), adjust(config, device, torch.tensor(float(found)))
        beyond |= host.scale > FP32_MAX
        assert beyond or numbers(host) == numbers(device)
        if host.overflowed_at_min and at_min == "raise":
            with pytest.raises(Exception, match="already at minimum"):
                theirs.update_scale(found)
            return
        theirs.update_scale(found)
        assert numbers(host)[0] == theirs.cur_scale
        assert host.hysteresis_left == theirs.cur_hysteresis


@dataclass
class Megatron:
    """The rule of ``DynamicGradScaler.update``, megatron/core/optimizer/grad_scaler.py at NVIDIA/Megatron-LM 00caa53.

    The scale and the factors are fp32 tensors there; the hysteresis goes on falling below 0 until the next growth.
    """

    scale: Tensor
    minimum: Tensor
    growth: Tensor
    backoff: Tensor
    interval: int
    hysteresis: int
    clean: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = torch.max(self.scale * self.backoff, self.minimum)
            return
        self.clean += 1
        if self.clean == self.interval:
            self.clean, self.left = 0, self.hysteresis
            self.scale = self.scale * self.growth


@quick
@given(
    initial=st.sampled_from([2.0**32, 2.0**16, 5.0]),
    minimum=st.sampled_from([1.0, 0.5, 3.0]),
    growth=st.sampled_from([2.0, 1.5, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.75]),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    trace=traces,
)
def test_megatron_is_the_sequence_of_its_dynamic_grad_scaler(
    initial: float, minimum: float, growth: float, backoff: float, interval: int, hysteresis: int, trace: list[bool]
) -> None:
    config = LossScaling.megatron(initial, minimum, growth, backoff, interval, hysteresis)
    theirs = Megatron(*map(torch.tensor, (initial, minimum, growth, backoff)), interval, hysteresis)
    for found, host, device in zip(trace, run(config, trace), run(config, trace, "cpu"), strict=True):
        theirs.update(found)
        if theirs.scale.isinf():
            break  # see the next test
        expected = (theirs.scale.item(), theirs.clean, max(theirs.left, 1))
        assert numbers(device)[:3] == expected
        assert numbers(host)[:3] == expected
