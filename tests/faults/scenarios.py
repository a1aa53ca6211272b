"""Every fault with the run it is put into, and what has to be found there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from faults import inject
from faults.model import Batches, Language, Patient, Regression, points, sentences
from lightning_mp import LossScaling
from lightning_mp.monitor.alerts import AlertSettings
from lightning_mp.monitor.events import Kind

NOT_FINITE: tuple[Kind, ...] = ("nonfinite_loss", "nonfinite_grad")
#: the scale falls by two before it is at its floor
NEAR_ITS_FLOOR = LossScaling(init_scale=2.0**10, min_scale=2.0**8)
#: a hundred times the gradients still fit under it
ROOMY = LossScaling(init_scale=2.0**6)
#: far above what fits: torch's initial scale is 2**16
TOO_HIGH = LossScaling(init_scale=2.0**20, growth_interval=500)


@dataclass(frozen=True)
class Scenario:
    """A fault. ``shows_after``: steps from its beginning to the first that could show it.

    ``by`` is who is to find it: ``TrainingHealth`` beside a plan, or ``NonFiniteGuard`` beside Lightning's own plugins.
    """

    name: str
    make: Callable[[int, int], inject.Injection]
    kinds: tuple[Kind, ...]
    precision: str = "32-true"
    model: Literal["language", "regression"] = "language"
    by: Literal["plan", "guard"] = "plan"
    world: int = 1
    shows_after: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, and on which side."""
        return f"{self.name} ({'NonFiniteGuard' if self.by == 'guard' else self.precision})"


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("fp16 overflow in a layer", inject.Overflow, NOT_FINITE, "16-mixed"),
    Scenario("one NaN weight", inject.NotANumber, NOT_FINITE, "bf16-mixed"),
    Scenario("one NaN weight", inject.NotANumber, NOT_FINITE, by="guard"),
    Scenario("one bad batch", inject.BadBatch, ("grad_norm_spike",), model="regression"),
    Scenario("100 x gradient spike", inject.GradientSpike, ("grad_norm_spike",)),
    Scenario(
        "100 x gradient spike", inject.GradientSpike, ("grad_norm_spike",), "16-mixed", options={"loss_scaling": ROOMY}
    ),
    # the step that is taken with it is still a good one; the next one shows where it led
    Scenario(
        "learning rate 30 x too high",
        inject.HighRate,
        ("grad_norm_spike", "loss_divergence"),
        shows_after=1,
    ),
    # losses that do not fall are a plateau when there is a window of them
    Scenario("dead learning", inject.DeadLearning, ("loss_plateau",), shows_after=AlertSettings().plateau_window - 1),
    Scenario("one rank only", inject.OneRank, NOT_FINITE, "bf16-mixed", world=2),
    Scenario("one rank only", inject.OneRank, NOT_FINITE, by="guard", world=2),
    # two overflows bring it to the floor
    Scenario(
        "scale stuck at its floor",
        inject.AlwaysOverflowing,
        ("scale_collapse",),
        "16-mixed",
        shows_after=2,
        options={"loss_scaling": NEAR_ITS_FLOOR},
    ),
    Scenario("slow data", inject.SlowData, ("throughput_drop",)),
)

#: healthy runs: a title, a precision, the plan's options
HEALTHY: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("healthy fp32", "32-true", {}),
    ("healthy fp16, warm-up overflows", "16-mixed", {"loss_scaling": TOO_HIGH}),
    ("healthy bf16", "bf16-mixed", {}),
)


def patient(model: str, seed: int) -> Patient:
    """The model, made anew."""
    return Language(seed) if model == "language" else Regression(seed)


def data(model: str, count: int, seed: int) -> Batches:
    """Its batches."""
    return Batches(sentences if model == "language" else points, count, seed)
