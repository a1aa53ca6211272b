"""A run that was saved and taken up again is the run that was not interrupted: scale, counters, weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError, PrecisionPolicy
from lightning_mp.callbacks import NonFiniteGuard
from support.models import FEATURES, Regression, batches, same_weights, weights
from support.oracles import MODES, SCALED, plan_for, stock_for
from support.running import fit, trainer
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace

adamw = partial(AdamW, lr=1e-2, eps=1e-4, fused=True)
every_mode = pytest.mark.parametrize("mode", MODES)


def _save(folder: Path, plan: Any, *steps: int, bad: tuple[int, ...] = (), **options: Any) -> tuple[Any, Trace]:
    module, trace = Regression(adamw, overflow_at=bad), Trace()
    callbacks = [trace, SaveAt(folder, *steps)]
    fit(module, plugins=[plan], callbacks=callbacks, data=ResumableBatches(), max_epochs=2, **options)
    return module, trace


def _resume(path: Path, plan: Any, bad: tuple[int, ...] = (), **options: Any) -> tuple[Any, Trace]:
    module, trace = Regression(adamw, overflow_at=bad), Trace()
    fit(module, plugins=[plan], callbacks=[trace], data=ResumableBatches(), max_epochs=2, ckpt_path=path, **options)
    return module, trace


@every_mode
def test_the_checkpoint_is_plain_and_under_the_plans_name(mode: str, tmp_path: Path) -> None:
    plan = plan_for(mode, pins={"net.1": "fp32"}, nonfinite=NonFinite(max_consecutive=7))
    _save(tmp_path, plan, 4, bad=(1, 2))
    saved = torch.load(tmp_path / "4.ckpt", weights_only=True)["MixedPrecisionPlan"]
    assert saved["steps"] == {"applied_steps": 2, "skipped_steps": 2, "streak": 0, "step_skipped": False}
    assert PrecisionPolicy.from_dict(saved["policy"]) == plan.policy
    assert ("scaler" in saved) == (mode in SCALED)
    if mode in SCALED:
        assert saved["scaler"]["scale"] == 64.0
        assert saved["scaler"]["_growth_tracker"] == 1


def test_a_checkpoint_of_another_format_version_is_read_or_answered_with_a_sentence(tmp_path: Path) -> None:
    module, _ = _save(tmp_path, plan_for("16-mixed"), 4)
    path = tmp_path / "4.ckpt"
    saved = torch.load(path, weights_only=True)
    state = saved["MixedPrecisionPlan"]
    assert state.pop("format_version") == 1
    torch.save(saved, path)  # as an older release wrote it
    resumed, _ = _resume(path, plan_for("16-mixed"))
    assert resumed.losses == module.losses[4:]
    for key, said in (("MixedPrecisionPlan", "The plan's state in the checkpoint"), ("lightning_mp", "The checkpoint")):
        torch.save({**saved, key: {**state, "format_version": 2}}, path)
        with pytest.raises(PlanError, match=f"{said} has format version 2.* Update lightning-mp"):
            _resume(path, plan_for("16-mixed"))


def test_a_streak_goes_on_over_the_interruption(tmp_path: Path) -> None:
    budget = NonFinite(max_consecutive=3)
    bad = (2, 3, 4, 5)
    with pytest.raises(NonFiniteError):
        _save(tmp_path, plan_for("bf16-mixed", nonfinite=budget), 4, bad=bad)
    with pytest.raises(NonFiniteError) as caught:
        _resume(tmp_path / "4.ckpt", plan_for("bf16-mixed", nonfinite=budget), bad)
    assert caught.value.step == 5


def test_a_stock_16_mixed_checkpoint_hands_over_scale_and_growth_tracker(tmp_path: Path) -> None:
    """Saved after step 4 by Lightning's own plugin, it goes on as Lightning itself would have gone on."""
    module, trace = Regression(partial(SGD, lr=1e-3, momentum=0.9), overflow_at=(1,)), Trace()
    stock = stock_for("16-mixed", init_scale=64.0, growth_interval=4)
    options: dict[str, Any] = {"data": ResumableBatches(), "max_epochs": 2}
    fit(module, callbacks=[trace, SaveAt(tmp_path, 4)], **stock, **options)
    resumed, rest = Regression(partial(SGD, lr=1e-3, momentum=0.9)), Trace()
    plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.torch(growth_interval=4))
    options["data"] = ResumableBatches()
    fit(resumed, plugins=[plan], callbacks=[rest], ckpt_path=tmp_path / "4.ckpt", **options)
    assert trace.scales[3] == 32.0
    assert rest.scales == trace.scales[4:]
    assert resumed.losses == module.losses[4:]
    assert same_weights(rest.weights[-1], trace.weights[-1])
    assert plan.skipped_steps == 0  # stock Lightning counted none


def test_our_checkpoint_loads_into_stock_lightning(tmp_path: Path) -> None:
    whole, _ = _save(tmp_path, plan_for("bf16-mixed"), 4)
    module = Regression(adamw)
    fit(module, precision="bf16-mixed", data=ResumableBatches(), max_epochs=2, ckpt_path=tmp_path / "4.ckpt")
    assert module.losses == whole.losses[4:]
    scaled = Regression(adamw)
    _save(tmp_path / "scaled", plan_for("16-mixed"), 4)
    path = tmp_path / "scaled" / "4.ckpt"
    fit(scaled, **stock_for("16-mixed"), data=ResumableBatches(), max_epochs=2, ckpt_path=path)
    assert len(scaled.losses) == 12


@pytest.mark.parametrize(
    ("before", "after"), [("16-mixed", "bf16-mixed"), ("bf16-mixed", "16-mixed"), ("32-true", "16-true")]
)
def test_a_run_may_go_on_in_another_mode(before: str, after: str, tmp_path: Path) -> None:
    _save(tmp_path, plan_for(before), 4, bad=(1,))
    plan = plan_for(after)
    module, trace = _resume(tmp_path / "4.ckpt", plan)
    assert (plan.applied_steps, plan.skipped_steps) == (15, 1)
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    if after in SCALED:
        assert trace.scales[0] == 256.0


class Sick(Regression):
    """Its gradients are not finite while it is ``sick``."""

    def __init__(self, sick: bool) -> None:
        super().__init__(adamw)
        self.sick = sick

    def on_after_backward(self) -> None:
        if self.sick:
            self.net[0].weight.grad.fill_(float("nan"))  # type: ignore[union-attr,operator]


#: what watches a run -> its Trainer arguments; a loss scale is searched for with up to five skips
WATCHED: dict[str, Callable[[str], dict[str, Any]]] = {
    "plan": lambda mode: {"plugins": [plan_for(mode)]},
    "guard": lambda mode: {"callbacks": [NonFiniteGuard()], **stock_for(mode)},
}
watched = pytest.mark.parametrize("watch", WATCHED)
scaled_or_not = pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])


@scaled_or_not
@watched
def test_a_resumed_fit_that_applies_no_step_fails(watch: str, mode: str, own_folder: Path) -> None:
    first = fit(Sick(False), **WATCHED[watch](mode))
    first.save_checkpoint("healthy.ckpt")
    with pytest.raises(NonFiniteError, match="applied 0 of its 8 optimizer steps"):
        fit(Sick(True), ckpt_path="healthy.ckpt", **{**WATCHED[watch](mode), "max_epochs": 2})


@scaled_or_not
@watched
def test_a_second_fit_of_a_trainer_that_applies_no_step_fails(watch: str, mode: str, own_folder: Path) -> None:
    runner = fit(Sick(False), **WATCHED[watch](mode))
    runner.fit_loop.max_epochs = 2
    with pytest.raises(NonFiniteError, match="applied 0 of its 8 optimizer steps"):
        runner.fit(Sick(True), batches())


@watched
def test_a_fit_with_nothing_left_to_do_succeeds(watch: str, own_folder: Path) -> None:
    """Resumed at its end, or run again, it tries no step; the counts stay."""
    runner = fit(Sick(False), **WATCHED[watch]("bf16-mixed"))
    runner.save_checkpoint("done.ckpt")
    runner.fit(Sick(True), batches())
    fit(Sick(True), ckpt_path="done.ckpt", **WATCHED[watch]("bf16-mixed"))
    counter: Any = runner.callbacks[0] if watch == "guard" else runner.precision_plugin
    assert (counter.applied_steps, counter.skipped_steps) == (8, 0)


class Wide(Regression):
    """Its first weight is large enough for torchao's optimizers, which leave small ones alone."""

    def __init__(self, make: Any, quantized: bool = False) -> None:
        super().__init__(make)
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 1))
        self.frozen = nn.Linear(64, 64)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        if quantized:
            quantization = pytest.importorskip("torchao.quantization")
            quantization.quantize_(self.frozen, quantization.Int8WeightOnlyConfig())
        self.frozen.requires_grad_(False)


LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
#: the optimizer, and whether weights are quantized
RESUMED = [*((name, False) for name in LOW_BIT), ("AdamW", True)]


def _low_bit(name: str) -> Callable[..., Any]:
    if name == "AdamW":
        return adamw
    return partial(getattr(pytest.importorskip("torchao.optim"), name), lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching")
@pytest.mark.parametrize("trusted", [None, False])
@pytest.mark.parametrize(("name", "quantized"), RESUMED)
def test_torchaos_tensors_resume_exactly_on_one_device(
    name: str, quantized: bool, trusted: bool | None, tmp_path: Path
) -> None:
    def run(*callbacks: Any, **options: Any) -> Wide:
        module, plan = Wide(_low_bit(name), quantized), plan_for("bf16-mixed")
        runner = trainer(plugins=[plan], callbacks=list(callbacks), max_epochs=2)
        runner.fit(module, ResumableBatches(), **options)
        return module

    with torch.compiler.set_stance("force_eager"):
        whole = run(SaveAt(tmp_path, 4))
        resumed = run(ckpt_path=tmp_path / "4.ckpt", weights_only=trusted)
    saved = torch.load(tmp_path / "4.ckpt", weights_only=True, map_location=lambda storage, place: storage)
    states = saved["optimizer_states"][0]["state"].values()
    kinds = {type(value).__name__ for state in states for value in state.values()}
    assert any(kind.startswith("OptimState") for kind in kinds) == (name in LOW_BIT)
    assert resumed.losses == whole.losses[4:]
    assert same_weights(resumed.net.state_dict(), whole.net.state_dict())
    if quantized:
        kept, before = saved["state_dict"]["frozen.weight"], whole.frozen.weight
        assert type(kept) is type(before.detach())
        assert torch.equal(kept.dequantize(), before.dequantize())
