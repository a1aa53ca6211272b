"""Every rule: what it fires on, and what it leaves alone; healthy runs, recorded and made, have no alert."""

import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp import PlanError
from lightning_mp.health.alerts import AT_FLOOR, FP8_SCALES, RULE_KINDS, SKIPPED, Alerts, AlertSettings, Reading
from lightning_mp.record import metric_names
from lightning_mp.record.events import Event, Kind

NAMES = {
    "loss": metric_names.LOSS,
    "memory_gib": metric_names.MEMORY_ALLOCATED,
    "skipped": SKIPPED,
    "scale_at_floor": AT_FLOOR,
    "fp8_scales": FP8_SCALES,
}


def reading(step: int, **numbers: Any) -> Reading:
    """Of a step that was applied, unless it says otherwise."""
    known = {NAMES.get(name, f"health/{name}"): number for name, number in numbers.items()}
    return {metric_names.STEP: step, SKIPPED: False, AT_FLOOR: False, **known}


def rows(**columns: Sequence[Any]) -> list[Reading]:
    return [
        reading(step, **dict(zip(columns, row, strict=True)))
        for step, row in enumerate(zip(*columns.values(), strict=True))
    ]


def said(kind: Kind, readings: Iterable[Reading], **settings: Any) -> list[Event]:
    alerts = Alerts({"kinds": [kind], **settings})
    return [event for reading in readings for event in alerts.judge(reading)]


def steps(kind: Kind, readings: Iterable[Reading], **settings: Any) -> list[int]:
    """The steps of the alerts."""
    return [event.step for event in said(kind, readings, **settings) if event.is_alert]


def noise(count: int, level: float = 1.0, spread: float = 0.2, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * draw.lognormvariate(0.0, spread) for _ in range(count)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spike_ration": 20}, "Did you mean 'spike_ratio'"),
        ({"kinds": ["loss_plateu"]}, "Did you mean 'loss_plateau'"),
        ({"plateau_window": 200.5}, "a whole number >= 8"),
        ({"divergence_window": 1}, "a whole number >= 8"),
        ({"streak_skips": 0}, "a whole number >= 1"),
        ({"memory_gib": 0}, "a number > 0"),
        ({"spike_ratio": float("nan")}, "default is 10"),
    ],
)
def test_what_cannot_be_is_refused_and_says_what_could(given: object, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        AlertSettings.of(given)  # type: ignore[arg-type]


ARMED = AlertSettings().spike_window


def with_spikes(at: dict[int, float], count: int = 300, **kind: float) -> list[float]:
    return [norm * at.get(step, 1.0) for step, norm in enumerate(noise(count, **kind))]  # type: ignore[arg-type]


def calm(*last: float) -> list[float]:
    """A model that knows its data: norms a thousandth of what they were."""
    return [*(norm * (1.0 if step < 100 else 1e-3) for step, norm in enumerate(noise(400, spread=0.1))), *last]


def swinging() -> list[float]:
    """Norms over two orders of magnitude all the time: 15 times the median is nothing new."""
    norms = noise(300, spread=0.9)
    norms[170] = 15.0
    return norms


#: norms, settings, the steps at which it is heard; a spike that lasts some steps is told once
SPIKES: dict[str, tuple[list[float], dict[str, float], list[int]]] = {
    "7 times the median": (with_spikes({170: 7}, spread=0.1), {}, []),
    "30 times": (with_spikes({170: 30}, spread=0.1), {}, [170]),
    "a ratio without deviations": (swinging(), {}, []),
    "deviations without a ratio": (with_spikes({170: 2.0}, spread=0.005), {}, []),
    "a lower ratio": (with_spikes({170: 2.0}, spread=0.005), {"spike_ratio": 1.5}, [170]),
    "a small norm": (calm(0.039), {}, []),
    "a small norm, farther off": (calm(0.2), {}, [400]),
    "a small norm that counts": (calm(0.039), {"spike_level": 0.01}, [400]),
    "before a window was seen": (with_spikes({ARMED - 1: 1e3}, spread=0.1), {}, []),
    "as soon as one was": (with_spikes({ARMED: 1e3}, spread=0.1), {}, [ARMED]),
    "twice": (with_spikes({170: 100.0, 171: 200.0, 173: 80.0, 220: 100.0}, spread=0.1), {}, [170, 220]),
}


@pytest.mark.parametrize(("norms", "settings", "heard"), SPIKES.values(), ids=SPIKES)
def test_a_spike_is_far_off_in_both_ways(norms: list[float], settings: dict[str, float], heard: list[int]) -> None:
    assert steps("grad_norm_spike", rows(grad_norm=norms), **settings) == heard


@settings(max_examples=50)
@given(power=st.integers(-60, 60), seed=st.integers(0, 2**16), at=st.integers(ARMED, 149), times=st.floats(1, 1e4))
def test_units_do_not_matter(power: int, seed: int, at: int, times: float) -> None:
    """Powers of two, so that no number is rounded."""
    norms = with_spikes({at: times}, count=150, seed=seed)
    scaled = [norm * 2.0**power for norm in norms]
    assert steps("grad_norm_spike", rows(grad_norm=scaled)) == steps("grad_norm_spike", rows(grad_norm=norms))


def falling() -> list[float]:
    shape = [2.0 + 2.0 * math.exp(-step / 50) for step in range(300)]
    return [loss + 0.1 * (draw - 1) for loss, draw in zip(shape, noise(300), strict=True)]


@pytest.mark.parametrize("after", [[3.5, 3.6, 3.7, 4.0], [50.0, 1e4, 1e9]], ids=["back where it began", "away"])
def test_three_readings_in_a_row_that_lose_what_was_learned(after: list[float]) -> None:
    assert steps("loss_divergence", rows(loss=falling() + after)) == [302]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), level=st.floats(-50, 50), spread=st.floats(0.01, 0.4))
def test_noise_around_a_level_is_no_divergence(seed: int, level: float, spread: float) -> None:
    losses = [level + draw - 1 for draw in noise(600, spread=spread, seed=seed)]
    assert steps("loss_divergence", rows(loss=losses)) == []


WINDOW = AlertSettings().plateau_window


def learning(count: int, rates: Sequence[float] | None = None) -> list[Reading]:
    """A loss from 4 to 2 with weights that move as far as the rate, of each step or 1e-3, says."""
    draws = zip(noise(count), noise(count, seed=1), noise(count, seed=2), rates or [1e-3] * count, strict=True)
    return [
        reading(
            step,
            loss=2 + 2 * math.exp(-step / 60) + 0.2 * (loss - 1),
            grad_norm=norm,
            update_ratio=rate * ratio,
            lr=rate,
        )
        for step, (loss, norm, ratio, rate) in enumerate(draws)
    ]


def dead(count: int, first: int = 0, level: float = 2.0, **columns: Any) -> list[Reading]:
    """A loss that only wobbles; nothing moves unless told otherwise."""
    still = {"update_ratio": 0.0, "lr": 1e-3, **columns}
    draws = zip(noise(count, seed=9), noise(count, seed=10), strict=True)
    return [
        reading(first + step, **{"loss": level + 0.2 * (loss - 1), "grad_norm": norm} | still)
        for step, (loss, norm) in enumerate(draws)
    ]


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({}, "weights do not move"),
        ({"lr": 0.0}, "the learning rate is 0"),
        ({"lr": None, "update_ratio": 1e-7}, "weights do not move"),
        ({"grad_norm": 0.0, "update_ratio": None}, "gradients are zero"),
    ],
    ids=["still", "rate 0", "hardly moving", "no gradients"],
)
def test_weights_that_stopped_are_found_a_window_later(columns: dict[str, Any], cause: str) -> None:
    events = said("loss_plateau", learning(600) + dead(WINDOW + 3, 600, **columns))
    (event,) = (event for event in events if event.is_alert)
    assert event.severity == "warning"
    assert cause in event.cause
    assert 600 <= event.step < 600 + WINDOW + 3


def test_a_flat_loss_without_falling_gradients_is_told_once_as_information() -> None:
    (event,) = said("loss_plateau", learning(3000))
    assert event.severity == "info"
    assert "learning is saturated" in event.cause
    assert 350 < event.step < 600, "a loss that has come down to its noise, and a window behind that"
    assert event.evidence["update_ratio"] > 1e-4
    assert said("loss_plateau", learning(3000, COSINE[:3000]))[0].severity == "info"


def test_weights_that_stop_after_saturated_learning_are_a_warning() -> None:
    severities = [event.severity for event in said("loss_plateau", learning(1000) + dead(WINDOW + 3, 1000))]
    assert severities == ["info", "warning"]


def moving(losses: Sequence[float], norms: Sequence[float], rates: Sequence[float] | None = None) -> list[Reading]:
    """Readings of weights that move all the time."""
    count = len(losses)
    return rows(loss=losses, grad_norm=norms, update_ratio=[1e-3] * count, lr=rates or [1e-3] * count)


FLAT = noise(600, level=2.0, spread=0.05)
#: what is no saturated learning: losses, gradient norms, rates
LEARNS: dict[str, list[Reading]] = {
    "gradients become smaller": moving(FLAT, [0.995**step for step in range(600)]),
    "the loss falls": moving([loss - 0.002 * step for step, loss in enumerate(FLAT)], noise(600, seed=1)),
    "the loss rises": moving([loss + 0.002 * step for step, loss in enumerate(FLAT)], noise(600, seed=1)),
    "warm-up": moving(FLAT, noise(600, seed=1), [1e-6 * (step + 1) for step in range(600)]),
    "fewer readings than the window": moving(FLAT[: WINDOW - 1], noise(WINDOW - 1, seed=1)),
    "a loss of zero": moving([0.0] * 600, noise(600, seed=1)),
}


@pytest.mark.parametrize("name", LEARNS)
def test_nothing_is_said_while_something_is_learned(name: str) -> None:
    assert said("loss_plateau", LEARNS[name]) == []


def scaled_by(role: str, scales: Sequence[float], others: float = 64.0) -> list[Reading]:
    """Readings of the scales of a layer ``up`` of which one role changes, and of a layer ``down`` that does not."""
    steady = {(layer, each): others for layer in ("up", "down") for each in ("input", "weight", "gradient")}
    return rows(fp8_scales=[{**steady, ("up", role): scale} for scale in scales])


HEALTHY_SCALES = noise(60, level=100.0, spread=0.1)
#: scales after the healthy ones, what changes, and by how much; ``None`` where nothing is told
JUMPS: dict[str, tuple[list[float], str | None]] = {
    "a drop of nine times": ([100.0 / 9] * 3, "drop"),
    "a rise of nine times": ([900.0] * 3, "rise"),
    "a drop of six times": ([100.0 / 6] * 3, None),
    "a rise of six times": ([600.0] * 3, None),
}


@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
@pytest.mark.parametrize("name", JUMPS)
def test_a_scale_eight_times_off_its_median_is_told_with_layer_role_and_factor(name: str, role: str) -> None:
    scales, change = JUMPS[name]
    events = said("scale_jump", scaled_by(role, [*HEALTHY_SCALES, *scales]))
    assert len(events) == (change is not None)
    step = 60 if role != "gradient" else 60 + AlertSettings().scale_patience - 1
    for event in events:
        assert (event.step, event.module, event.severity) == (step, "up", "warning")
        assert (event.evidence["role"], event.evidence["change"]) == (role, change)
        assert event.evidence["factor"] == pytest.approx(9, rel=0.15)
        assert event.evidence["scales_that_jumped"] == 1
        assert "FP8(skip=('up',))" in event.advice


def test_one_batch_with_other_gradients_is_no_jump() -> None:
    scales = [*HEALTHY_SCALES, 100.0 / 40, 100.0 / 40, *HEALTHY_SCALES, 4000.0, *HEALTHY_SCALES]
    assert said("scale_jump", scaled_by("gradient", scales)) == []
    assert len(said("scale_jump", scaled_by("input", scales))) == 2


def test_a_jump_names_the_layer_where_it_began_and_each_new_one_is_told() -> None:
    healthy = {("up", "input"): 64.0, ("down", "input"): 64.0, ("down", "weight"): 64.0}
    bad_batch = {**healthy, ("up", "input"): 4.0, ("down", "input"): 2.0}
    later = {**healthy, ("down", "weight"): 1.0}
    readings = [healthy] * 20 + [bad_batch, bad_batch, healthy, later, later]
    events = said("scale_jump", rows(fp8_scales=readings))
    assert [(event.step, event.module, event.evidence["role"]) for event in events] == [
        (20, "up", "input"),
        (23, "down", "weight"),
    ]
    assert events[0].evidence["scales_that_jumped"] == 2
    gradients = {(layer, "gradient"): 64.0 for layer in ("up", "down")}
    large = {(layer, "gradient"): 2.0 for layer in ("up", "down")}
    (event,) = said("scale_jump", rows(fp8_scales=[gradients] * 30 + [large] * 3))
    assert event.module == "down", "where the backward pass begins"


def test_a_scale_is_judged_once_a_window_was_seen() -> None:
    window = AlertSettings().scale_window
    assert said("scale_jump", scaled_by("input", [100.0] * (window - 1) + [1.0])) == []
    assert len(said("scale_jump", scaled_by("input", [100.0] * window + [1.0]))) == 1
    assert len(said("scale_jump", scaled_by("input", [100.0] * window + [50.0]), scale_ratio=1.5)) == 1
    assert said("scale_jump", rows(fp8_scales=[None] * 50)) == []


def timed(seconds: list[float]) -> list[Reading]:
    return [reading(step, samples_per_s=8 / each) for step, each in enumerate(seconds)]


FAST = noise(200, level=0.01)


def test_half_a_window_of_slow_steps_is_the_word() -> None:
    (event,) = said("throughput_drop", timed(FAST + [0.1] * 50))
    assert event.step == 200 + AlertSettings().throughput_window // 2
    assert event.evidence["samples_per_s"] == pytest.approx(80)
    assert event.evidence["ratio"] == pytest.approx(0.1, rel=0.2)


def test_memory_that_creeps_is_found_once_with_its_pace() -> None:
    (event,) = said("memory_growth", rows(memory_gib=[4.0 + 0.001 * step for step in range(1000)]))
    assert event.step == AlertSettings().memory_warmup + AlertSettings().memory_window - 1
    assert event.evidence["gib_per_1000_steps"] == pytest.approx(0.9, rel=0.05)


def scaled(
    overflows: str, init: float = 2.0**16, floor: float = 1.0, interval: int = 100, every: int = 1
) -> list[Reading]:
    """A torch scaler over steps of which ``x`` overflows, read every so many steps."""
    readings, scale, clean = [], init, 0
    for step, sign in enumerate(overflows):
        bad = sign == "x"
        clean = 0 if bad else clean + 1
        scale = max(floor, scale / 2) if bad else scale
        if clean == interval:
            scale, clean = scale * 2, 0
        readings.append(reading(step, loss_scale=scale, skipped=bad, scale_at_floor=scale <= floor))
    return readings[every - 1 :: every]


def test_six_skips_in_a_row_are_a_streak_told_once() -> None:
    (event,) = said("skip_streak", scaled("." * 50 + "x" * 30 + "." * 50))
    assert (event.step, event.value) == (55, 6.0)
    assert event.evidence == {"skips_in_a_row": 6, "loss_scale": 2.0**10}
    assert steps("skip_streak", scaled("." * 50 + "x" * 8 + "." * 50 + "x" * 8)) == [55, 113]


def test_a_scale_at_its_floor_that_still_overflows_has_collapsed() -> None:
    """2**16 is used up after 16 overflows; the third skip at the floor is the word."""
    (event,) = said("scale_collapse", scaled("." * 20 + "x" * 40))
    assert (event.step, event.severity, event.value) == (20 + 15 + 2, "error", 1.0)
    assert event.evidence["skipped_at_floor"] == 3
    assert steps("scale_collapse", scaled("x" * 40, floor=0.0)) == [18], "torch's own goes on; below 1 it has collapsed"


COSINE = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 5000)) for step in range(5000)]
SCALING: tuple[Kind, ...] = ("skip_streak", "scale_collapse")
#: the rules that have nothing to say, and of what
QUIET: dict[str, tuple[tuple[Kind, ...], list[Reading]]] = {
    "bad batches": (("loss_divergence",), rows(loss=[*falling(), 50.0, 2.0, 50.0, 2.0, 50.0])),
    "a harder stretch of data": (("loss_divergence",), rows(loss=falling() + [2.3] * 20)),
    "a thousandfold of nearly nothing": (("loss_divergence",), rows(loss=[10.0] * 10 + [1e-6] * 200 + [1e-3] * 10)),
    "the noise floor of the data": (("loss_plateau",), learning(3000)),
    "all gets smaller at a loss of zero": (
        ("loss_plateau",),
        rows(loss=[1e-9] * 900, grad_norm=[0.98**n for n in range(900)], update_ratio=[0.0] * 900, lr=[1e-3] * 900),
    ),
    "a cosine ends at nothing": (("loss_plateau",), learning(5000, COSINE)),
    "warm-up": (
        ("loss_plateau",),
        rows(
            loss=noise(500, level=4.0, spread=0.02),
            grad_norm=[1.0] * 500,
            update_ratio=[1e-6 * (step + 1) for step in range(500)],
            lr=[1e-6 * (step + 1) for step in range(500)],
        ),
    ),
    "a loss where it began, and weights that move": (
        ("loss_plateau",),
        dead(WINDOW + 50, level=4.0, update_ratio=1e-3),
    ),
    "nine slow steps": (("throughput_drop",), timed([*FAST, *[1.0] * 9, *FAST])),
    "every other step": (("throughput_drop",), timed([*FAST, *[1.0, 0.01] * 30, *FAST])),
    "half as fast": (("throughput_drop",), timed(FAST + [0.02] * 50)),
    "longer sequences": (
        ("throughput_drop",),
        rows(samples_per_s=[100.0] * 200 + [10.0] * 9, tokens_per_s=[1e4] * 209),
    ),
    "memory that fills": (("memory_growth",), rows(memory_gib=[1.0 + 3.0 * min(n, 40) / 40 for n in range(1000)])),
    "another shape, once": (("memory_growth",), rows(memory_gib=[4.0] * 400 + [6.0] * 600)),
    "emptied after an epoch": (("memory_growth",), rows(memory_gib=[4.0 + n % 100 * 0.01 for n in range(1000)])),
    "too little to mention": (("memory_growth",), rows(memory_gib=[80.0 + 2e-3 * n for n in range(1000)])),
    "five skips": (SCALING, scaled("xxxxx" + "." * 500)),
    "skips here and there": (SCALING, scaled("..xxxxx" + "." * 150 + "xx" + "." * 500)),
    "a search from 2**24": (SCALING, scaled("x" * 13 + "." * 500, init=2.0**24)),
    "a search from 2**32": (SCALING, scaled("x" * 16 + "." * 200, init=2.0**32)),
    "one in each interval": (SCALING, scaled(("." * 40 + "x") * 20, interval=40)),
    "read seldom": (SCALING, scaled("." * 2000, every=50)),
    "at the floor, where nothing overflows": (SCALING, scaled("." * 500, init=1.0, interval=10_000)),
    "at the floor, now and then": (SCALING, scaled("x" + "." * 9 + "x" + "." * 300, init=1.0, interval=10_000)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_healthy_runs_do_is_no_alert(name: str) -> None:
    kinds, readings = QUIET[name]
    assert {kind: steps(kind, readings) for kind in kinds} == {kind: [] for kind in kinds}


RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "healthy.json").read_text())


def recorded(name: str) -> list[Reading]:
    """A run's readings, whose loss scale stands where it changes."""
    run = RECORDED[name]
    skipped, scales = set(run["skipped"]), dict(run["scale"])
    found, scale = [], None
    for step, (loss, norm, ratio) in enumerate(zip(run["loss"], run["grad_norm"], run["update_ratio"], strict=True)):
        scale = scales.get(step, scale)
        numbers = {"loss": loss, "grad_norm": norm, "update_ratio": ratio, "loss_scale": scale}
        found.append(reading(step, **numbers, skipped=step in skipped))
    return found


def troubled() -> list[Reading]:
    """A run in which every rule finds something."""
    columns = zip(noise(700, 2.0, 0.05, 0), noise(700, 1.0, 0.2, 1), strict=True)
    readings = []
    for step, (loss, norm) in enumerate(columns):
        late, stuck = step >= 300, step >= 650
        readings.append(
            reading(
                step,
                loss=9.0 if 600 <= step < 610 else loss,
                grad_norm=norm * (1000 if step == 280 else 1),
                update_ratio=0.0,
                loss_scale=1.0 if stuck else 2.0**16,
                skipped=stuck,
                scale_at_floor=stuck,
                lr=1e-3,
                samples_per_s=10.0 if late else 100.0,
                memory_gib=4.0 + 0.001 * step,
                fp8_scales={("up", "input"): 1.0 if step == 500 else 64.0},
            )
        )
    return readings


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_healthy_run_is_no_alert(name: str) -> None:
    alerts = Alerts()
    events = [event for reading in recorded(name) for event in alerts.judge(reading)]
    assert [event for event in events if event.is_alert] == []
    assert {event.kind for event in events} <= {"loss_plateau"}


def test_every_rule_speaks_once_and_says_what_why_and_what_to_do() -> None:
    alerts = Alerts()
    events = [event for reading in troubled() for event in alerts.judge(reading)]
    assert sorted(event.kind for event in events) == sorted(RULE_KINDS)
    for event in events:
        assert event.is_alert
        assert event.cause
        assert event.advice
        assert event.evidence
        assert event.value is not None
        module = "up" if event.kind == "scale_jump" else None
        assert (event.rank, event.module, event.action) == (None, module, "log")
