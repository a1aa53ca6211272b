"""What TrainingHealth tells of faulty steps, and what it does about them."""

import ast
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFiniteError, PlanError
from lightning_mp.callbacks import DtypePinning, NonFiniteGuard, PrecisionAudit, TrainingHealth
from lightning_mp.record import metric_names
from support import audit_faults, fp8
from support.manual import Pair, in_turn
from support.models import Regression, batches, same_weights, weights
from support.oracles import plan_for, stock_for
from support.running import fit

#: a spike is judged by as many steps before it; and many more rows than these steps take
WINDOW = 16
ROWS = 8 * (WINDOW + 20)
PLAIN = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
SPIKE_AT = WINDOW + 8
HALVED = ("32-true", "bf16-mixed", "16-mixed")
HOSTS: dict[str, Any] = {
    **{f"stock {mode}": partial(stock_for, mode) for mode in HALVED},
    **{f"plan {mode}": lambda mode=mode: {"plugins": [plan_for(mode)]} for mode in HALVED},
    "plan that ignores": lambda: {"plugins": [plan_for("32-true", nonfinite="ignore")]},
}
#: the same with a scale that leaves room for a spike
ROOM: dict[str, Any] = HOSTS | {
    "stock 16-mixed": lambda: stock_for("16-mixed", init_scale=4.0),
    "plan 16-mixed": lambda: {"plugins": [plan_for("16-mixed", LossScaling(init_scale=4.0))]},
}
hosts = pytest.mark.parametrize("host", HOSTS)
# an alert is a warning
pytestmark = pytest.mark.filterwarnings("ignore:TrainingHealth. step:UserWarning")


class Faulty(Regression):
    def __init__(self, fault: str, at: int = 4, optimizer: Any = PLAIN, scheduler: Any = None) -> None:
        super().__init__(optimizer, scheduler)
        self.fault, self.at = fault, at
        self.after: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = self.trainer.global_step == self.at
        if now and self.fault == "batch":
            batch = (batch[0] * float("nan"), batch[1])
        if now and self.fault == "weight":
            self.net[1].weight.data[3] = float("nan")
        loss = self.loss(batch)
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss * 1000 if now and self.fault == "spike" else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(weights(self))


def watched(tmp_path: Path, module: Any, monitor: dict[str, Any] | None = None, **options: Any) -> TrainingHealth:
    mine = TrainingHealth(tmp_path / "run", report=False, alerts={"spike_window": WINDOW}, **(monitor or {}))
    options.setdefault("data", batches(ROWS) if getattr(module, "at", 0) > 8 else batches())
    fit(module, callbacks=[*options.pop("callbacks", []), mine], **options)
    return mine


def alerts(mine: TrainingHealth) -> list[Any]:
    return [event for event in mine.events if event.is_alert]


@hosts
def test_a_bad_batch_is_named_where_it_came_in(host: str, tmp_path: Path) -> None:
    mine = watched(tmp_path, Faulty("batch"), max_steps=5, **HOSTS[host]())
    (event,) = alerts(mine)
    assert (event.step, event.kind, event.rank) == (4, "nonfinite_loss", 0)
    assert (event.module, event.evidence["batch_idx"]) == ("net.0", 4)
    assert "batch" in event.cause
    assert math.isnan(mine.rows[-1][metric_names.LOSS])


@hosts
def test_a_bad_weight_is_named_with_its_module(host: str, tmp_path: Path) -> None:
    (event,) = alerts(watched(tmp_path, Faulty("weight"), **HOSTS[host]()))  # once, however long it lasts
    assert (event.step, event.kind) == (4, "nonfinite_loss")
    assert (event.module, event.parameter) == ("net.1", "net.1.weight")


@pytest.mark.parametrize("host", ["stock 16-mixed", "plan 16-mixed"])
def test_an_ordinary_overflow_is_information(host: str, tmp_path: Path) -> None:
    mine = watched(tmp_path, Regression(PLAIN, overflow_at=(0, 1, 5)), **HOSTS[host]())
    assert [event.step for event in mine.events] == [0, 1, 5]
    assert {(event.kind, event.severity) for event in mine.events} == {("nonfinite_grad", "info")}
    assert [row[metric_names.SKIPPED_STEPS] for row in mine.rows] == [1, 2, 2, 2, 2, 3, 3, 3]


def test_the_search_for_a_scale_is_no_alert_however_long_it_takes(tmp_path: Path) -> None:
    plan = plan_for("16-mixed", LossScaling(init_scale=2.0**32))
    mine = watched(tmp_path, Regression(PLAIN), data=batches(8 * 40), plugins=[plan])
    assert len(mine.events) > 10
    assert alerts(mine) == []


def test_what_a_plan_raises_is_written_down(tmp_path: Path) -> None:
    mine = TrainingHealth(tmp_path / "run", report=False)
    with pytest.raises(NonFiniteError) as raised:
        fit(Faulty("batch"), callbacks=[mine], plugins=[plan_for("32-true", nonfinite="raise")])
    (event,) = mine.events
    assert (event.step, event.kind, event.module) == (4, "nonfinite_loss", raised.value.module)
    assert (event.step, event.action) == (raised.value.step, "raise")
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text())["action"] == "raise"


@pytest.mark.filterwarnings("ignore:NonFiniteGuard:UserWarning")
def test_a_guard_beside_it_tells_these_itself(tmp_path: Path) -> None:
    guard = NonFiniteGuard(run_dir=tmp_path / "run")
    mine = watched(tmp_path, Faulty("batch"), callbacks=[guard])
    assert [event.kind for event in guard.events] == ["nonfinite_loss"]
    assert mine.events == []
    assert math.isnan(mine.rows[4][metric_names.GRAD_NORM])
    assert mine.rows[-1][metric_names.SKIPPED_STEPS] == 1


def test_an_event_is_in_file_logger_console_and_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path)
    mine = watched(tmp_path, Faulty("spike", SPIKE_AT), logger=logger)
    (said,) = [record for record in caplog.records if record.name == "lightning_mp"]
    assert said.levelname == "WARNING"
    assert said.message.startswith(f"TrainingHealth: step {SPIKE_AT}: grad norm spike ")
    (event,) = alerts(mine)
    (line,) = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(line) == event.to_dict()
    assert (event.kind, event.step) == ("grad_norm_spike", SPIKE_AT)
    assert "health/events/grad_norm_spike" in (Path(logger.log_dir) / "metrics.csv").read_text()


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@hosts
def test_a_skipped_step_changes_nothing_but_the_next_does(host: str, optimizer: str, tmp_path: Path) -> None:
    rising = partial(LambdaLR, lr_lambda=lambda step: 1 + step)
    module = Faulty("spike", SPIKE_AT, partial(PLAIN, fused=optimizer == "fused"), rising)
    mine = watched(tmp_path, module, {"actions": {"grad_norm_spike": "skip"}}, **ROOM[host]())
    (event,) = alerts(mine)
    assert (event.step, event.action) == (SPIKE_AT, "skip")
    before, at, behind = module.after[SPIKE_AT - 1 : SPIKE_AT + 2]
    assert same_weights(before, at)
    assert not same_weights(at, behind)
    assert [row[metric_names.SKIPPED_STEPS] for row in mine.rows[SPIKE_AT - 1 : SPIKE_AT + 2]] == [0, 1, 1]
    assert module.lrs[SPIKE_AT - 1] < module.lrs[SPIKE_AT] == module.lrs[SPIKE_AT + 1] < module.lrs[SPIKE_AT + 2]


@pytest.mark.parametrize(
    ("module", "named"),
    [(lambda: Pair(in_turn), "2 optimizers"), (lambda: Regression(partial(LBFGS, lr=0.1)), "LBFGS")],
)
def test_where_a_step_cannot_be_left_out_skip_is_refused(module: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=named):
        watched(tmp_path, module(), {"actions": {"grad_norm_spike": "skip"}})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"grad_norm_spikes": "log"}, "grad_norm_spike"),
        ({"loss_divergence": "stopp"}, "'stop'"),
        ({"loss_divergence": 3}, "'stop'"),
        ({"throughput_drop": "skip"}, "grad_norm_spike"),
        ({"nonfinite_loss": "skip"}, "NonFiniteGuard"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(given: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        TrainingHealth(actions=given)


def test_stop_stops(tmp_path: Path) -> None:
    mine = watched(tmp_path, Faulty("spike", SPIKE_AT), {"actions": {"grad_norm_spike": "stop"}})
    assert alerts(mine)[0].action == "stop"
    assert mine.rows[-1][metric_names.STEP] == SPIKE_AT


PLANNED = [True, False]


def pins_in(text: str, planned: bool) -> Any:
    named = re.search(r"(pins=|DtypePinning\()(\{.*?\})", text)
    assert named is not None, text
    assert (named[1] == "pins=") == planned, text
    return ast.literal_eval(named[2])


def fit_pinned(module: Any, callback: Any, planned: bool, precision: Any, pins: Any, **plan: Any) -> None:
    if planned:
        arguments = {"plugins": [MixedPrecisionPlan(precision, pins=pins, **plan)], "callbacks": [callback]}
    else:
        arguments = {**stock_for(precision), "callbacks": [*([DtypePinning(pins)] if pins else []), callback]}
    fit(module, max_epochs=3, **arguments)


class Beyond(Regression):
    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=1e-6))
        with torch.no_grad():
            self.net[0].weight.mul_(1e6)


@pytest.mark.parametrize("planned", PLANNED)
@pytest.mark.filterwarnings("ignore")
def test_alerts_of_a_run_in_fp16(planned: bool, tmp_path: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    plan = plan_for("16-mixed", LossScaling(init_scale=1.0, min_scale=1.0))
    health = TrainingHealth(tmp_path / "sick", report=False)
    with pytest.raises(NonFiniteError) if planned else nullcontext():
        plugin = plan if planned else MixedPrecision("16-mixed", "cpu", scaler)
        fit(Beyond(), max_epochs=3, plugins=[plugin], callbacks=[health])
    said = {event.kind: event.advice for event in health.events if event.is_alert}
    assert {"nonfinite_loss", "skip_streak", "scale_collapse"} <= said.keys()
    pins = pins_in(said["nonfinite_loss"], planned)
    assert pins == {"net.0": "fp32"}
    for kind in ("skip_streak", "scale_collapse"):
        assert "bf16-mixed" in said[kind]
        assert ("by the plan's pins (" if planned else "by DtypePinning (") in said[kind]
        assert "{" not in said[kind]  # the other event names the module
    for mode, given in (("16-mixed", pins), ("bf16-mixed", None)):
        mended = TrainingHealth(tmp_path / mode, report=False)
        fit_pinned(Beyond(), mended, planned, mode, given)
        assert not {event.kind for event in mended.events if event.is_alert} & said.keys()


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
    make, audit = AUDITED[name][0], PrecisionAudit(run_dir=tmp_path / "sick")
    fit_pinned(make(), audit, planned, "bf16-mixed", None)
    text = audit.report.to_markdown()
    assert not audit.report.ok
    pins: dict[str, str] = {}
    for one in re.finditer(r"(pins=|DtypePinning\()\{.*?\}", text):
        pins |= pins_in(one[0], planned)
    assert pins, text
    mended = PrecisionAudit(run_dir=tmp_path / "mended")
    fit_pinned(make(), mended, planned, "bf16-mixed", pins)
    assert mended.report.ok, mended.report.to_markdown()


LAYER = "blocks.0.up"


class Changed(torch.autograd.Function):
    """Hands its input on; what comes back is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change(gradients[0].clone()), None


def _inf(values: Tensor) -> Tensor:
    return values * torch.inf


@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_under_fp8_the_layer_is_named(role: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    module = fp8.Language()
    layer: Any = module.get_submodule(LAYER)
    if role == "weight":
        layer.weight.data[3, 3] = torch.nan
    elif role == "input":
        layer.register_forward_pre_hook(lambda _, a: (_inf(a[0]),))
    else:
        layer.register_forward_hook(lambda _, a, output: Changed.apply(output, _inf))
    health = TrainingHealth(tmp_path / "run", report=False)
    with pytest.raises(NonFiniteError, match="applied 0 of its 2"):
        fp8.run(module, fp8.plan("rowwise"), data=fp8.texts(rows=8), callbacks=[health], max_steps=2)
    event = health.events[0]
    assert event.kind.startswith("nonfinite")
    assert event.module == LAYER
