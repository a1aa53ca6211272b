"""All rules together, in the order in which their events are reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lightning_mp.monitor.advice import pinning
from lightning_mp.monitor.alerts.fp8 import FP8Underflow, OperandScaleJump
from lightning_mp.monitor.alerts.grad_norm_spike import GradNormSpike
from lightning_mp.monitor.alerts.loss_divergence import LossDivergence
from lightning_mp.monitor.alerts.loss_plateau import LossPlateau
from lightning_mp.monitor.alerts.lost_updates import LostUpdates
from lightning_mp.monitor.alerts.machine import MemoryGrowth, ThroughputDrop
from lightning_mp.monitor.alerts.reading import Reading
from lightning_mp.monitor.alerts.rule import Rule
from lightning_mp.monitor.alerts.scale import ScaleCollapse, ScaleJump, SkipStreak
from lightning_mp.monitor.alerts.settings import AlertSettings
from lightning_mp.monitor.events import Event, Kind

RULES: tuple[type[Rule], ...] = (
    GradNormSpike,
    LossPlateau,
    LossDivergence,
    ScaleCollapse,
    SkipStreak,
    ScaleJump,
    OperandScaleJump,
    FP8Underflow,
    LostUpdates,
    ThroughputDrop,
    MemoryGrowth,
)


class Alerts:
    """The rules over one run's readings. ``settings`` is whatever :meth:`AlertSettings.of` takes."""

    def __init__(self, settings: bool | Mapping[str, Any] | AlertSettings | None = None) -> None:
        self.settings = AlertSettings.of(settings)
        #: what is advised is written as the plan's own fields, rather than as callbacks
        self.under_plan = False
        self.rules = [rule(self.settings) for rule in RULES if rule.kind in self.settings.kinds]

    def look(self, reading: Reading, *, only: Collection[Kind] | None = None) -> list[Event]:
        """The events that begin in ``reading``; rank, module and action are for the caller to fill in.

        ``only`` restricts it to rules of those kinds. A rule judges a step once, so that some rules can be asked before
        the optimizer's step and the rest after it.
        """
        asked = [rule for rule in self.rules if only is None or rule.kind in only]
        events = [event for rule in asked if (event := rule.look(reading)) is not None]
        pinned = pinning(["…"], under_plan=self.under_plan).partition(", before")[0]
        return [replace(event, advice=event.advice.format(pinned=pinned)) for event in events]

    def state_dict(self) -> dict[str, Any]:
        """Every rule's windows and counts, as plain values."""
        return {rule.key(): rule.state_dict() for rule in self.rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; a rule that is not in it starts afresh."""
        for rule in self.rules:
            rule.load_state_dict(state.get(rule.key(), {}))
