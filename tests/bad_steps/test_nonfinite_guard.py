"""Stock plugins, guarded: a non-finite step changes nothing, and says where the value was born."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, Adagrad, AdamW

from lightning_mp import LossScaleError, LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from support.cells import WHOLE
from support.manual import Pair, in_turn
from support.models import Regression, batches, same_weights, weights
from support.nonfinite import BAD, FAULTS, STOCK, Breaks, without
from support.oracles import plan_for, stock_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-2, eps=1e-4, weight_decay=0.3),
    "fused": partial(AdamW, lr=1e-2, eps=1e-4, weight_decay=0.3, fused=True),
    "momentum": partial(SGD, lr=1e-3, momentum=0.9, weight_decay=0.3),
    "fused momentum": partial(SGD, lr=1e-3, momentum=0.9, weight_decay=0.3, fused=True),
    "adagrad": partial(Adagrad, lr=1e-2, weight_decay=0.3),
}
every_mode = pytest.mark.parametrize("mode", STOCK)
#: faults that are over with their batch
PASSING = [how for how in FAULTS if how != "weight"]


def _ordinary(how: str, mode: str) -> bool:
    return mode == "16-mixed" and how == "gradient"


@pytest.fixture
def guard(tmp_path: Path) -> Any:
    return partial(NonFiniteGuard, run_dir=tmp_path)


@every_mode
@pytest.mark.parametrize("how", FAULTS)
def test_the_event_names_step_module_parameter_and_batch(guard: Any, how: str, mode: str, tmp_path: Path) -> None:
    watched = guard()
    fit(Breaks(how), callbacks=[watched], **stock_for(mode))
    event, (module, _, bad_loss) = watched.events[0], FAULTS[how]
    assert (event.step, event.rank, event.module) == (BAD, 0, module)
    assert event.parameter is None or event.parameter.startswith(module)
    assert event.kind == ("nonfinite_loss" if bad_loss else "nonfinite_grad")
    assert event.severity == ("info" if _ordinary(how, mode) else "warning")
    assert event.action == "skip"
    if not _ordinary(how, mode):
        assert (event.evidence["batch_idx"], event.evidence["skips_in_a_row"]) == (BAD, 1)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines == [event.to_dict() for event in watched.events]


#: but for torch's fused SGD on the CPU, which leaves bf16 parameters as they were
MADE = [(mode, name) for mode in STOCK for name in OPTIMIZERS if (mode, name) != ("bf16-true", "fused momentum")]


def _often(mode: str, name: str) -> bool:
    return mode in ("32-true", "16-mixed") or name in ("adamw", "fused")


@pytest.mark.parametrize(
    ("mode", "name", "how"),
    [
        *(pytest.param(*made, "gradient", marks=[] if _often(*made) else WHOLE) for made in MADE),
        *((mode, "adamw", how) for mode in STOCK for how in PASSING[:-1]),
    ],
)
def test_a_skipped_step_is_one_that_never_was(guard: Any, how: str, name: str, mode: str) -> None:
    traces, bad = (Trace(), Trace()), (0, 3, 4)
    broken, clean = (Breaks(how, bad_, OPTIMIZERS[name]) for bad_ in (bad, ()))
    watched = guard()
    fit(broken, callbacks=[watched, traces[0]], **stock_for(mode))
    fit(clean, callbacks=[traces[1]], data=without(*bad), **stock_for(mode))
    assert (watched.skipped_steps, watched.applied_steps) == (3, 5)
    # a skip halves the scale, and another scale rounds fp16 otherwise
    close = {"rtol": 0, "atol": 0} if mode != "16-mixed" else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(weights(broken), weights(clean), **close)
    torch.testing.assert_close(traces[0].states[-1], traces[1].states[-1], **close)
    assert not same_weights(weights(broken), traces[0].start)


@pytest.mark.parametrize("fused", [True, False])
def test_an_ordinary_overflow_is_left_to_stocks_scaler(guard: Any, fused: bool, tmp_path: Path) -> None:
    make = partial(AdamW, lr=1e-2, eps=1e-4, fused=fused)
    watched, traces, plugins = guard(max_consecutive=0), (Trace(), Trace()), [stock_for("16-mixed") for _ in range(2)]
    one, other = (Regression(make, overflow_at=(0, 3, 4)) for _ in range(2))
    fit(one, callbacks=[watched, traces[0]], **plugins[0])
    fit(other, callbacks=[traces[1]], **plugins[1])
    assert same_weights(weights(one), weights(other))
    torch.testing.assert_close(traces[0].states[-1], traces[1].states[-1], rtol=0, atol=0)
    assert plugins[0]["plugins"][0].state_dict() == plugins[1]["plugins"][0].state_dict()
    assert [(event.step, event.severity) for event in watched.events] == [(0, "info"), (3, "info"), (4, "info")]
    assert [event.evidence["loss_scale"] for event in watched.events] == [256.0, 128.0, 64.0]
    assert (watched.skipped_steps, watched.applied_steps) == (3, 5)
    assert not (tmp_path / "nonfinite").exists()


@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
@pytest.mark.parametrize("bad", range(4, 8))
def test_one_bad_micro_batch_costs_the_whole_window(guard: Any, bad: int, mode: str) -> None:
    watched, trace = guard(), Trace()
    fit(Breaks("batch", (bad,)), callbacks=[watched, trace], accumulate_grad_batches=4, **stock_for(mode))
    assert (watched.skipped_steps, watched.applied_steps) == (1, 1)
    assert watched.events[0].evidence["batch_idx"] == bad
    assert same_weights(trace.weights[3], trace.weights[7])


def test_schedulers_and_averages_stand_still(guard: Any) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    def scheduled(how: str, bad: tuple[int, ...]) -> Breaks:
        module = Breaks(how, bad)
        module.make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        return module

    broken, clean = scheduled("loss", (1, 2)), scheduled("loss", ())
    averages = EMAWeightAveraging(decay=0.5), EMAWeightAveraging(decay=0.5)
    fit(broken, callbacks=[guard(), averages[0]])
    fit(clean, callbacks=[averages[1]], data=without(1, 2))
    assert [lr for batch, lr in enumerate(broken.lrs) if batch not in (2, 3)] == clean.lrs
    assert same_weights(weights(broken), weights(clean))  # the averages, swapped in at the end
    assert "lr_scheduler_step" not in vars(broken)


@every_mode
@pytest.mark.parametrize(("budget", "arguments"), [(0, {"on_trip": "raise"}), *((n, {}) for n in (0, 1, 3))])
def test_the_budget_is_of_skips_in_a_row(guard: Any, budget: int, arguments: dict[str, Any], mode: str) -> None:
    watched, trace = guard(**(arguments or {"max_consecutive": budget})), Trace()
    module = Breaks("loss", tuple(range(2, 8)))
    with pytest.raises(NonFiniteError) as caught:
        fit(module, callbacks=[trace, watched], **stock_for(mode))
    error = caught.value
    assert (error.rank, error.step, error.module) == (0, 2 + budget, "net.4")
    for part in (f"{budget + 1} in a row with a non-finite loss, {budget} allowed", "NonFiniteGuard(on_trip="):
        assert part in str(error)
    assert [event.action for event in watched.events] == [*["skip"] * budget, "raise"]
    assert watched.applied_steps == 2
    assert same_weights(weights(module), trace.weights[1])


@pytest.mark.parametrize(("mode", "how", "steps"), [("32-true", "loss", 1), ("16-mixed", "gradient", 6)])
def test_applying_no_step_is_an_error(guard: Any, mode: str, how: str, steps: int, tmp_path: Path) -> None:
    module = Breaks(how, tuple(range(8)))
    with pytest.raises(NonFiniteError, match=rf"applied 0 of its {steps} optimizer steps.*NonFiniteGuard\('raise'\)"):
        fit(module, callbacks=[guard()], max_steps=steps, **stock_for(mode))
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


@every_mode
@pytest.mark.parametrize("which", ["net", "other", "net other"])
def test_of_several_optimizers_the_bad_one_skips(guard: Any, which: str, mode: str) -> None:
    watched, trace = guard(), Trace()
    fit(Pair(in_turn, {BAD: which}), callbacks=[watched, trace], **stock_for(mode))
    before, after = trace.weights[BAD - 1], trace.weights[BAD]
    assert {name.split(".")[0] for name in before if torch.equal(before[name], after[name])} == set(which.split())
    assert (watched.skipped_steps, watched.applied_steps) == (len(which.split()), 16 - len(which.split()))
    assert len(watched.events) == 1
    assert watched.events[0].module.startswith(which.split()[0])


def test_an_optimizer_that_needs_its_closure_is_refused(guard: Any) -> None:
    module = Regression(torch.optim.LBFGS)
    with pytest.raises(PlanError, match="LBFGS moves weights between two evaluations"):
        fit(module, callbacks=[guard()])
    assert module.losses == []


@pytest.mark.parametrize("where", ["on_after_backward", "on_before_optimizer_step"])
def test_a_gradient_that_a_hook_of_the_module_spoils_is_skipped_and_named(guard: Any, where: str) -> None:
    class Spoils(Regression):
        def _spoil(self, *_: Any) -> None:
            if self.trainer.global_step == BAD:
                self.net[0].weight.grad[0, 0] = float("nan")  # type: ignore[index,union-attr]

    module, watched = type("Hooked", (Spoils,), {where: Spoils._spoil})(), guard()
    fit(module, callbacks=[watched])
    (event,) = watched.events
    assert (event.step, event.module, event.parameter) == (BAD, "net.0", "net.0.weight")
    assert "changed after the backward pass" in event.cause
    assert (watched.skipped_steps, watched.applied_steps) == (1, 7)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert "on_before_optimizer_step" not in vars(module)


@pytest.mark.parametrize("budget", [-1, True, 1.5])
def test_bad_arguments_are_refused_together(budget: Any) -> None:
    with pytest.raises(PlanError, match=rf"2 errors.\n.*on_trip='rewnd'[^\n]*\n.*max_consecutive={budget}"):
        NonFiniteGuard("rewnd", budget)  # type: ignore[arg-type]


def test_a_resumed_run_takes_the_counts_up(guard: Any, tmp_path: Path) -> None:
    second, options = guard(max_consecutive=2), {"data": ResumableBatches()}
    fit(Breaks("loss", (1, 3)), callbacks=[guard(), SaveAt(tmp_path / "saved", 4)], **options)
    with pytest.raises(NonFiniteError) as caught:
        fit(Breaks("loss", (4, 5)), callbacks=[second], ckpt_path=tmp_path / "saved" / "4.ckpt", **options)
    assert caught.value.step == 5  # the skip of step 3 counts too
    assert (second.skipped_steps, second.applied_steps) == (4, 2)


# A plan looks at gradients, and those of a loss of inf may be finite.
SKIPPED = [how for how in FAULTS if how not in ("weight", "infinite loss")]


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "nonfinite").glob("*.pt"))


def _plan(mode: str, folder: Path, **rule: Any) -> MixedPrecisionPlan:
    return plan_for(mode, nonfinite=NonFinite(save_batch=True, run_dir=str(folder), **rule))


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("how", SKIPPED)
def test_it_tells_and_saves_what_the_guard_does(how: str, mode: str, tmp_path: Path) -> None:
    fit(Breaks(how), plugins=[_plan(mode, tmp_path / "plan")])
    fit(Breaks(how), callbacks=[NonFiniteGuard(run_dir=tmp_path / "guard")], **stock_for(mode))
    (told,), (other,) = _events(tmp_path / "plan"), _events(tmp_path / "guard")
    for field in ("step", "kind", "severity", "rank", "module", "parameter", "cause", "action"):
        assert told[field] == other[field], field
    assert _saved(tmp_path / "plan") == _saved(tmp_path / "guard")


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_the_batch_that_ends_the_run_is_saved_and_the_error_is_the_plans(action: str, tmp_path: Path) -> None:
    def error(**rule: Any) -> NonFiniteError:
        with pytest.raises(NonFiniteError) as caught:
            fit(Breaks("loss"), plugins=[plan_for("32-true", nonfinite=NonFinite(action=action, **rule))])
        return caught.value

    budget = {"max_consecutive": 0}
    saving, plain = error(save_batch=True, run_dir=str(tmp_path), **budget), error(**budget)
    assert str(saving) == str(plain)
    assert (saving.step, saving.module, saving.rank) == (plain.step, plain.module, plain.rank)
    assert [event["action"] for event in _events(tmp_path)] == ["raise"]
    assert len(_saved(tmp_path)) == 1


def test_an_overflow_at_the_minimum_scale_stays_a_loss_scale_error(tmp_path: Path) -> None:
    rule, scaling = NonFinite(save_batch=True, run_dir=str(tmp_path)), LossScaling(init_scale=1, at_min="raise")
    plan = MixedPrecisionPlan("16-mixed", loss_scaling=scaling, nonfinite=rule)
    with pytest.raises(LossScaleError, match="overflow at the minimum loss scale"):
        fit(Breaks("gradient"), plugins=[plan])
    assert len(_saved(tmp_path)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainers_callbacks_are_given_back(fails: bool, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if fails:
                raise RuntimeError("on purpose")

    runner = trainer(plugins=[_plan("32-true", tmp_path)], callbacks=[Fails()])
    before = list(runner.callbacks)
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        runner.fit(Breaks("loss", ()), batches())
    assert runner.callbacks == before
    fit(Breaks("loss", ()), plugins=[_plan("32-true", tmp_path)])  # the folder is free again
