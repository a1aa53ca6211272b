"""Whatever is advised works: it is taken from the text, carried out, accepted, and what was said is not said again.

Under a plan it is in terms of the plan, beside Lightning's own plugins in terms of callbacks.
"""

from __future__ import annotations

import ast
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFiniteError
from lightning_mp.callbacks import (
    DtypePinning,
    PrecisionAudit,
    TrainingHealth,
)
from support import audit_faults
from support.models import Regression
from support.oracles import stock_for
from support.running import fit

PLANNED = [True, False]


def pins_in(text: str, planned: bool) -> Any:
    """The pins that a text advises, in the words of a run with or without a plan."""
    named = re.search(r"(pins=|DtypePinning\()(\{.*?\})", text)
    assert named is not None, text
    assert (named[1] == "pins=") == planned, text
    return ast.literal_eval(named[2])


def pinned(planned: bool, precision: Any, pins: Any, **plan: Any) -> dict[str, Any]:
    """Trainer arguments of a run under those pins."""
    if planned:
        return {"plugins": [MixedPrecisionPlan(precision, pins=pins, **plan)]}
    return {**stock_for(precision), "callbacks": [DtypePinning(pins)] if pins else []}


def with_callback(arguments: dict[str, Any], callback: Any) -> dict[str, Any]:
    return {**arguments, "callbacks": [*arguments.get("callbacks", ()), callback]}


# ---------------------------------------------------------------------- alerts, and the events of non-finite steps


class Beyond(Regression):
    """Its first product is beyond fp16 and finite in fp32."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=1e-6))
        with torch.no_grad():
            self.net[0].weight.mul_(1e6)


@pytest.mark.parametrize("planned", PLANNED)
@pytest.mark.filterwarnings("ignore")
def test_alerts_of_a_run_in_fp16(planned: bool, tmp_path: Any) -> None:
    low = LossScaling(init_scale=1.0, min_scale=1.0)
    sick: dict[str, Any] = pinned(True, "16-mixed", None, loss_scaling=low)
    if not planned:
        sick = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0))]}
    health = TrainingHealth(tmp_path / "sick", report=False)
    with pytest.raises(NonFiniteError) if planned else nullcontext():
        fit(Beyond(), max_epochs=3, **with_callback(sick, health))
    said = {event.kind: event.advice for event in health.events if event.is_alert}
    assert {"nonfinite_loss", "skip_streak", "scale_collapse"} <= said.keys()
    pins = pins_in(said["nonfinite_loss"], planned)
    assert pins == {"net.0": "fp32"}
    for kind in ("skip_streak", "scale_collapse"):
        assert "bf16-mixed" in said[kind]
        assert list(pins_in(said[kind], planned)) == ["…"]  # of which the other one names the module
    ways = [pinned(planned, "16-mixed", pins), pinned(planned, "bf16-mixed", None)]
    for number, way in enumerate(ways):
        mended = TrainingHealth(tmp_path / str(number), report=False)
        fit(Beyond(), max_epochs=3, **with_callback(way, mended))
        assert not {event.kind for event in mended.events if event.is_alert} & said.keys()


# ---------------------------------------------------------------------- the audit

AUDITED: dict[str, tuple[Any, list[bool]]] = {
    "cast behind": (audit_faults.CastBehind, PLANNED),
    "half checkpoint": (audit_faults.HalfCheckpoint, [False]),
    "outside autocast": (audit_faults.OutsideAutocast, PLANNED),
    "casts itself": (audit_faults.Custom, PLANNED),
    "norm that casts itself": (audit_faults.NormInHalf, PLANNED),
    "own norm": (audit_faults.OwnNormInHalf, PLANNED),
}


@pytest.mark.parametrize(
    ("name", "planned"), [(name, planned) for name, (_, ways) in AUDITED.items() for planned in ways]
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_audit_advises(name: str, planned: bool, tmp_path: Any) -> None:
    make, precision = AUDITED[name][0], "bf16-mixed"
    audit = PrecisionAudit(run_dir=tmp_path / "sick")
    fit(make(), **with_callback(pinned(planned, precision, None), audit))
    text = audit.report.to_markdown()
    assert not audit.report.ok
    pins: dict[str, str] = {}
    for one in re.finditer(r"(pins=|DtypePinning\()\{.*?\}", text):
        pins |= pins_in(one[0], planned)
    assert pins, text
    mended = PrecisionAudit(run_dir=tmp_path / "mended")
    fit(make(), **with_callback(pinned(planned, precision, pins), mended))
    assert mended.report.ok, mended.report.to_markdown()
