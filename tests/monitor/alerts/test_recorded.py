"""Healthy runs of 2,000 steps, recorded: each would be an alert if a rule had one condition less.

All are AdamW on a CPU. ``long tails``: a net of 2,000 weights that sorts points into ten classes, lr 1e-2, batches of
4. ``learned by heart``: a GPT-2 of two layers and width 32 on one batch of 16 rows, lr 1e-3. ``fp16 warm-up``: a net on
noisy numbers under 16-mixed, its scale from 2**24 on with a growth interval of 200, lr 3e-3 with warm-up and cosine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.monitor.alerts import Alerts, Reading

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "healthy.json").read_text())


def readings(name: str) -> list[Reading]:
    run = RECORDED[name]
    skipped, scales = set(run["skipped"]), dict(run["scale"])
    found, scale, row = [], None, 0
    for step, (loss, norm, ratio) in enumerate(zip(run["loss"], run["grad_norm"], run["update_ratio"], strict=True)):
        scale, row = scales.get(step, scale), row + 1 if step in skipped else 0
        found.append(
            Reading(
                step=step,
                loss=loss,
                grad_norm=norm,
                update_ratio=ratio,
                loss_scale=scale,
                skipped=step in skipped,
                skips_in_a_row=row,
            )
        )
    return found


def kinds(name: str, **settings: float) -> set[str]:
    alerts = Alerts(settings)
    return {event.kind for reading in readings(name) for event in alerts.judge(reading)}


@pytest.mark.parametrize("name", RECORDED)
def test_a_healthy_run_is_no_alert(name: str) -> None:
    assert kinds(name) == set()


@pytest.mark.parametrize(
    ("name", "without", "kind"),
    [
        ("long tails", {"spike_sigmas": 1e-9}, "grad_norm_spike"),
        ("long tails", {"divergence_patience": 1}, "loss_divergence"),
        ("learned by heart", {"spike_ratio": 1.0}, "grad_norm_spike"),
        ("learned by heart", {"spike_level": 1e-9}, "grad_norm_spike"),
        ("learned by heart", {"divergence_progress": 1e-9}, "loss_divergence"),
        ("fp16 warm-up", {"streak_skips": 1}, "skip_streak"),
    ],
)
def test_each_condition_is_needed(name: str, without: dict[str, float], kind: str) -> None:
    assert kind in kinds(name, **without)
