"""Whatever is advised works: it is taken from the text, carried out, accepted, and what was said is not said again.

Under a plan it is in terms of the plan, beside Lightning's own plugins in terms of callbacks.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.callbacks import (
    ActivationCheckpointing,
    DtypePinning,
    EnableTF32,
    NonFiniteGuard,
    PrecisionAudit,
    TrainingHealth,
)
from lightning_mp.errors import NonFiniteError
from support import audit_faults, hf
from support.doctor import A100, V100, Wrapped, found, net
from support.models import FEATURES, Regression
from support.nonfinite import Breaks
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


class Between(Regression):
    """What it computes between two modules is beyond fp16 and finite in fp32, as attention's scores may be."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up(x)
            return self.down(up * 1e3 @ (up * 1e3).t() @ up * 1e-9)

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=1e-6))
        self.net = nn.Sequential(self.Gated(), *self.net)


def test_an_operation_between_modules_that_overflows_is_not_laid_on_the_batch() -> None:
    def run(pins: Any) -> list[Any]:
        health = TrainingHealth(report=False)
        scale = LossScaling(init_scale=1.0, min_scale=1.0)
        fit(Between(), **with_callback(pinned(True, "16-mixed", pins, loss_scaling=scale), health))
        return [event for event in health.events if event.kind == "nonfinite_loss"]

    sick = run(None)[0]
    assert sick.module == "net.0.down"
    assert "an operation between module 'net.0.up' and that one" in sick.cause
    pins = pins_in(sick.advice, planned=True)
    assert pins == {"net.0": "fp32"}
    assert run(pins) == []


@pytest.mark.parametrize("planned", PLANNED)
@pytest.mark.filterwarnings("ignore")
def test_alerts_of_a_run_in_fp16(planned: bool, tmp_path: Any) -> None:
    low = LossScaling(init_scale=1.0, min_scale=1.0)
    sick: dict[str, Any] = pinned(True, "16-mixed", None, loss_scaling=low)
    if not planned:
        sick = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0))]}
    health = TrainingHealth(tmp_path / "sick", report=False)
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


@pytest.mark.filterwarnings("ignore")
def test_what_the_guard_advises(tmp_path: Any) -> None:
    guard = NonFiniteGuard(run_dir=tmp_path / "sick")
    fit(Beyond(), **with_callback(pinned(False, "16-mixed", None), guard))
    pins = pins_in(guard.events[-1].advice, planned=False)
    mended = NonFiniteGuard(run_dir=tmp_path / "mended")
    fit(Beyond(), **with_callback(pinned(False, "16-mixed", pins), mended))
    assert mended.events == []


def test_what_the_error_of_a_plan_advises() -> None:
    stops = LossScaling(init_scale=1.0, min_scale=1.0, at_min="raise")
    with pytest.raises(NonFiniteError) as error:
        fit(Breaks("gradient"), plugins=[MixedPrecisionPlan("16-mixed", loss_scaling=stops)])
    assert "use 'bf16-mixed', without loss_scaling" in str(error.value)
    fit(Breaks("gradient", ()), **pinned(True, "16-mixed", pins_in(str(error.value), True), loss_scaling=stops))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_folder")
def test_nothing_is_advised_of_the_root_that_no_pin_covers() -> None:
    class Bare(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(float("nan")))

        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * self.gain

    health = TrainingHealth(alerts=False, report=False)
    fit(Bare(), **with_callback(pinned(True, "bf16-mixed", None), health))
    assert health.events
    assert all("pins=" not in event.advice for event in health.events)


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


# ---------------------------------------------------------------------- the doctor


@dataclass(frozen=True)
class Advised:
    """A run that the doctor finds ``name`` in; ``follow`` makes model, plan and options by what its fix says."""

    name: str
    model: Any
    precision: Any
    follow: Any
    scaling: Any = None
    options: Any = None
    ways: tuple[bool, ...] = (True, False)

    def plan(self, planned: bool) -> Any:
        return MixedPrecisionPlan(self.precision, loss_scaling=self.scaling) if planned else self.precision


def _named(case: Advised, fix: str, planned: bool) -> Any:
    """Another precision, the one that is quoted."""
    precision = re.search(r"use '([^']+)'", fix)
    assert precision is not None, fix
    return case.model(), MixedPrecisionPlan(precision[1]) if planned else precision[1], {}  # type: ignore[arg-type]


def _pins(case: Advised, fix: str, planned: bool) -> Any:
    """Pins, which the doctor cannot see where a callback makes them; the run has to take them."""
    pins = pins_in(fix, planned)
    arguments = pinned(planned, case.precision, pins)
    fit(Wrapped(case.model(), partial(torch.optim.SGD, lr=1e-4)), data=DATA, **arguments)
    return case.model(), MixedPrecisionPlan(case.precision, pins=pins), {}


def _scale(case: Advised, fix: str, planned: bool) -> Any:
    if planned:
        rule = re.search(r"LossScaling\([^)]*\)", fix)
        assert rule is not None, fix
        return case.model(), MixedPrecisionPlan(case.precision, loss_scaling=eval(rule[0])), {}
    plugin = re.search(r"MixedPrecision\(.*\)\)", fix)
    assert plugin is not None, fix
    return case.model(), eval(plugin[0], {**globals(), "device": "cpu"}), {}


def _tf32(case: Advised, fix: str, planned: bool) -> Any:
    if planned:
        assert "MixedPrecisionPlan(tf32='high')" in fix
        return case.model(), MixedPrecisionPlan(case.precision, tf32="high"), {}
    assert "EnableTF32()" in fix
    return case.model(), case.precision, {"trainer_args": {"callbacks": [EnableTF32()]}}


def _blocks(case: Advised, fix: str, planned: bool) -> Any:
    pattern = re.search(r"(checkpointing=|ActivationCheckpointing\()'([^']+)'", fix)
    assert pattern is not None, fix
    assert (pattern[1] == "checkpointing=") == planned
    model = case.model()
    model.gradient_checkpointing_disable()
    if not planned:
        ActivationCheckpointing(pattern[2])
        return model, case.precision, {}
    plan = MixedPrecisionPlan(case.precision, checkpointing=pattern[2])
    plan.convert_module(model)
    return model, plan, {}


def _reentrant() -> Any:
    model: Any = hf.llama(lora=True)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.base_model.model.disable_input_require_grads()
    return model


DATA = DataLoader(TensorDataset(torch.randn(8, 16), torch.randn(8, 16)), batch_size=4)


class OwnNorm(nn.Module):
    """A norm of someone's own, in whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), OwnNorm())


def _layer_normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))


ADVISED = {
    "norm": Advised("norm_in_half", _normed, "bf16-mixed", _pins),
    "norm of a true mode": Advised("norm_in_half", _layer_normed, "bf16-true", _pins),
    "eps": Advised("eps_underflows", _normed, "16-mixed", _pins),
    "true mode": Advised("no_fp32_masters", net, "bf16-true", _named),
    "scaled true mode": Advised("no_fp32_masters", net, "16-true", _named),
    "emulated": Advised("bf16_emulated", net, "bf16-mixed", _named, options={"device": V100}),
    "tf32": Advised("tf32_off", net, "32-true", _tf32, options={"device": A100}),
    "high scale": Advised(
        "scale_overflows_at_once", net, "16-mixed", _scale, LossScaling(init_scale=2.0**32), ways=(True,)
    ),
    "high floor": Advised(
        "scale_overflows_at_once",
        net,
        "16-mixed",
        _scale,
        LossScaling(init_scale=2.0**32, min_scale=2.0**20),
        ways=(True,),
    ),
    "floor above a batch": Advised(
        "scale_overflows_at_once",
        lambda: Wrapped(net()),
        "16-mixed",
        _scale,
        LossScaling(init_scale=2.0**20, min_scale=2.0**20),
        {"batch": (torch.ones(4, 16) * 50, torch.ones(4, 8))},
        ways=(True,),
    ),
    "batch": Advised(
        "scale_overflows_at_once",
        lambda: Wrapped(net()),
        "16-mixed",
        _scale,
        options={"batch": (torch.ones(4, 16) * 2000, torch.ones(4, 8))},
    ),
    "accumulation": Advised(
        "accumulation_overflows",
        net,
        "16-true",
        _scale,
        LossScaling(init_scale=2.0**15),
        {"trainer_args": {"accumulate_grad_batches": 4}},
        ways=(True,),
    ),
    "adapters": Advised("lora_checkpoint_no_input_grads", _reentrant, "bf16-mixed", _blocks),
}


@pytest.mark.parametrize(
    ("case", "planned"), [(case, planned) for case, one in ADVISED.items() for planned in one.ways]
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_doctor_advises(case: str, planned: bool) -> None:
    one = ADVISED[case]
    torch.manual_seed(0)
    sick = found(one.model(), one.plan(planned), **(one.options or {}))
    torch.manual_seed(0)
    model, plan, more = one.follow(one, sick[one.name].fix, planned)
    assert one.name not in found(model, plan, **{**(one.options or {}), **more})
