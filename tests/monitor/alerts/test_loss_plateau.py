from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp.monitor.alerts import AlertSettings, Reading
from monitor.alerts.feed import noise, rows, said, steps

WINDOW = AlertSettings().plateau_window


def learning(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """A loss from 4 to 2 with weights that move: each row a reading's numbers."""
    draws = zip(noise(count, seed=seed), noise(count, seed=seed + 1), noise(count, seed=seed + 2), strict=True)
    return [
        {
            "loss": 2 + 2 * math.exp(-step / 60) + 0.2 * (loss - 1),
            "grad_norm": norm,
            "update_ratio": 1e-3 * ratio,
            "lr": 1e-3,
        }
        for step, (loss, norm, ratio) in enumerate(draws)
    ]


def dead(count: int, level: float = 2.0, seed: int = 9, **columns: Any) -> list[dict[str, Any]]:
    """A loss that only wobbles; nothing moves unless told otherwise."""
    still = {"update_ratio": 0.0, "lr": 1e-3, **columns}
    draws = zip(noise(count, seed=seed), noise(count, seed=seed + 1), strict=True)
    return [{"loss": level + 0.2 * (loss - 1), "grad_norm": norm} | still for loss, norm in draws]


def read(*parts: list[dict[str, Any]]) -> list[Reading]:
    return [Reading(step=step, **row) for step, row in enumerate(row for part in parts for row in part)]


def test_a_run_at_the_noise_floor_of_its_data_has_converged() -> None:
    assert steps("loss_plateau", read(learning(3000))) == []


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
    (event,) = said("loss_plateau", read(learning(600), dead(WINDOW + 3, **columns)))
    assert event.severity == "warning"
    assert cause in event.cause
    assert 600 <= event.step < 600 + WINDOW + 3


@pytest.mark.parametrize(
    ("columns", "severity"),
    [
        ({}, "warning"),
        ({"lr": 0.0}, "warning"),
        ({"update_ratio": 1e-9, "lr": 1e-9}, "warning"),
        ({"update_ratio": 1e-3}, "info"),
        ({"update_ratio": None}, "info"),
    ],
)
def test_a_loss_where_it_began_is_an_alert_only_if_nothing_moves(columns: dict[str, Any], severity: str) -> None:
    """Where weights move it may be noise over what is nearly known: the event says what was seen, no more."""
    (event,) = said("loss_plateau", read(dead(WINDOW + 50, level=4.0, **columns)))
    assert (event.step, event.severity, event.evidence["window"]) == (WINDOW - 1, severity, WINDOW)
    assert ("weights move" in event.cause) == (severity == "info")


def test_no_gradients_at_a_loss_of_zero_is_no_fault() -> None:
    """A hinge loss that is met by every sample has none."""
    met = dead(WINDOW + 3, loss=0.0, grad_norm=0.0, update_ratio=None)
    assert steps("loss_plateau", read(learning(300), met)) == []


def test_a_falling_gradient_norm_is_no_plateau() -> None:
    """At a loss of zero everything gets smaller."""
    readings = [Reading(step=step, loss=1e-9, grad_norm=0.98**step, update_ratio=0.0, lr=1e-3) for step in range(900)]
    assert steps("loss_plateau", readings) == []


def test_a_schedule_may_end_at_nothing() -> None:
    """A cosine's last steps hardly move a weight, and are meant not to."""
    rates = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 5000)) for step in range(5000)]
    rows_ = learning(5000)
    readings = [
        Reading(step=step, **{**row, "lr": rate, "update_ratio": rate})
        for step, (row, rate) in enumerate(zip(rows_, rates, strict=True))
    ]
    assert steps("loss_plateau", readings) == []


def test_warm_up_is_waited_for() -> None:
    """While the rate rises from nearly nothing, a loss that has not fallen yet is no news."""
    readings = [
        Reading(step=step, loss=loss, grad_norm=1.0, update_ratio=1e-6 * (step + 1), lr=1e-6 * (step + 1))
        for step, loss in enumerate(noise(500, level=4.0, spread=0.02))
    ]
    assert steps("loss_plateau", readings) == []


def test_it_is_told_once() -> None:
    assert len(steps("loss_plateau", read(learning(300), dead(2000)))) == 1


def test_half_a_window_of_missing_losses_is_half_a_window_less() -> None:
    parts = dead(2 * WINDOW, level=4.0)
    for row in parts[::2]:
        row["loss"] = math.nan
    assert steps("loss_plateau", read(parts)) == [2 * WINDOW - 1]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_dead_learning_is_found_whatever_the_noise(seed: int) -> None:
    assert steps("loss_plateau", read(learning(400, seed=seed), dead(WINDOW + 3, seed=seed + 7)))


def test_columns_alone_are_enough() -> None:
    """Only losses are known: they have not fallen, and nothing says that gradients fall."""
    assert steps("loss_plateau", rows(loss=noise(WINDOW, level=4.0, spread=0.01))) == [WINDOW - 1]
