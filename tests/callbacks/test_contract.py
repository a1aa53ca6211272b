"""What every callback owes: it can be built, runs twice, gives everything back; one that acts yields to a plan."""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_mp import PlanError, callbacks
from support.manual import Manual, between
from support.models import Regression, batches, same_weights, weights
from support.oracles import MODES, plan_for, stock_for
from support.running import fit, trainer

CALLBACKS: dict[str, Callable[[], Callback]] = {
    "EnableTF32": lambda: callbacks.EnableTF32("high"),
    "DtypePinning": lambda: callbacks.DtypePinning({"LayerNorm": "bf16", "net.3": "fp32"}),
    "ActivationCheckpointing": lambda: callbacks.ActivationCheckpointing("net"),
    "NonFiniteGuard": callbacks.NonFiniteGuard,
    "LossScaleMonitor": callbacks.LossScaleMonitor,
    "PrecisionAudit": callbacks.PrecisionAudit,
    "TrainingHealth": callbacks.TrainingHealth,
}
#: those that change something, and the plan's field that does the same
ACTING = {
    "EnableTF32": "tf32",
    "DtypePinning": "pins",
    "ActivationCheckpointing": "checkpointing",
    "NonFiniteGuard": "nonfinite",
}
MONITORS = sorted(CALLBACKS.keys() - ACTING)
every_callback = pytest.mark.parametrize("name", CALLBACKS)
every_mode = pytest.mark.parametrize("mode", MODES)
# monitors without a run_dir write under the root folder
pytestmark = pytest.mark.usefixtures("own_folder")


def _build(name: str) -> Callback:
    return CALLBACKS[name]()


def _process() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32, torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
        ]  # fmt: skip


def _shape(module: LightningModule) -> list[Any]:
    return [
        [type(m) for m in module.modules()],
        {name: (p.dtype, id(p)) for name, p in module.named_parameters()},
        [sorted(key for key in m.__dict__ if key.startswith("_lmp")) for m in module.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()],
        "lr_scheduler_step" in vars(module),
    ]


class Fails(Regression):
    """Its third training step raises."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise KeyError("planned")
        return super().training_step(batch, batch_idx)


def test_every_public_callback_is_under_this_contract() -> None:
    assert set(callbacks.__all__) == {*CALLBACKS, "replay_saved"}


@every_callback
def test_it_is_copied_and_pickled(name: str) -> None:
    used = _build(name)
    # Lightning keeps the module's ``log`` on a used callback, so that the module is pickled along
    fit(Regression(partial(torch.optim.SGD, lr=1e-3)), precision="32-true", callbacks=[used])
    for callback in (_build(name), used):
        for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert type(copied) is type(callback)
            fit(Regression(), precision="32-true", callbacks=[copied])


@every_callback
def test_everything_is_back_after_a_fit_that_failed_and_one_that_did_not(name: str) -> None:
    callback, failing, module, oracle = _build(name), Fails(), Regression(), Regression()
    for each, ends in ((failing, pytest.raises(KeyError, match="planned")), (module, nullcontext())):
        before, process = _shape(each), _process()
        with ends:
            fit(each, precision="32-true", callbacks=[callback])
        assert _shape(each) == before
        assert _process() == process
    fit(oracle, precision="32-true", callbacks=[_build(name)])
    assert module.losses == oracle.losses


@every_callback
def test_every_stage_is_given_back(name: str) -> None:
    class Evaluated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.results.append(self.loss(batch).item())

        test_step = validation_step

    module = Evaluated()
    module.results = []
    before = _shape(module)
    runner = trainer(precision="32-true", callbacks=[_build(name)])
    runner.validate(module, batches(), verbose=False)
    assert _shape(module) == before
    runner.test(module, batches(), verbose=False)
    assert _shape(module) == before
    assert module.results[:8] == module.results[8:]


class Adapts(Manual):
    """Trains itself on what it is evaluated on, with an optimizer of its own, as test-time adaptation does."""

    def __init__(self) -> None:
        super().__init__(between(lambda *_: None))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        own = torch.optim.SGD(self.parameters(), lr=1e-2)
        with torch.enable_grad():
            self.manual_backward(self.loss(batch))
        own.step()
        own.zero_grad()

    validation_step = test_step


@pytest.mark.parametrize("name", [*MONITORS, "NonFiniteGuard"])
def test_a_backward_pass_while_evaluating_is_no_training_step(name: str) -> None:
    runs: list[Any] = []
    for callback in (None, _build(name)):
        module, arguments = Adapts(), {"callbacks": [callback] if callback else [], "inference_mode": False}
        trainer(**arguments).test(module, batches(), verbose=False)
        trainer(**arguments).fit(module, batches(), batches())  # validates before training, too
        runs.append(weights(module))
    assert same_weights(*runs)
    assert isinstance(callback, callbacks.PrecisionAudit | callbacks.LossScaleMonitor) or _steps_of(callback) == 8


def _steps_of(callback: Any) -> int:
    return callback.applied_steps if isinstance(callback, callbacks.NonFiniteGuard) else len(callback.rows)


@pytest.mark.parametrize("name", ACTING)
def test_beside_a_plan_it_refuses_and_names_the_plans_field(name: str) -> None:
    module, mode = Regression(), "16-mixed"
    before, numbers = _shape(module), weights(module)
    with pytest.raises(PlanError) as caught:
        fit(module, plugins=[plan_for(mode)], callbacks=[_build(name)])
    assert f"{name} next to MixedPrecisionPlan('{mode}'" in str(caught.value)
    assert f"MixedPrecisionPlan({ACTING[name]}=...)" in str(caught.value)
    assert _shape(module) == before
    assert same_weights(weights(module), numbers)
    assert module.losses == []


@pytest.mark.parametrize("name", [*MONITORS, "NonFiniteGuard"])
@every_mode
def test_what_only_reads_changes_no_number(name: str, mode: str) -> None:
    """Beside a plan where it may be there, beside Lightning's own plugin otherwise."""
    losses, trained = _run(mode, name not in ACTING, _build(name))
    alone, trained_alone = _run_alone(mode, name not in ACTING)
    assert losses == alone
    assert same_weights(trained, trained_alone)


def _run(mode: str, planned: bool, *callbacks: Callback) -> tuple[list[float], dict[str, Tensor]]:
    module = Regression(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4))
    stock = {"precision": mode} if mode == "16-true" else stock_for(mode)
    fit(module, callbacks=[*callbacks], **({"plugins": [plan_for(mode)]} if planned else stock))
    return module.losses, weights(module)


_run_alone = cache(_run)


@pytest.mark.parametrize("order", [list, reversed])
def test_all_of_them_work_together(order: Any) -> None:
    module = Regression(scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    before = _shape(module)
    fit(module, precision="bf16-mixed", callbacks=[_build(name) for name in order([*CALLBACKS])])
    assert _shape(module) == before
    assert module.lrs == [1e-2 * 0.5**step for step in range(8)]


class Unoptimized(Regression):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.filterwarnings("ignore:configure_optimizers.. returned no optimizer. So losses are not scaled")
@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
def test_a_module_without_an_optimizer_takes_each_batch_once(mode: str) -> None:
    module = Unoptimized()
    fit(module, plugins=[plan_for(mode)], callbacks=[_build(name) for name in MONITORS])
    assert module.seen == 8


WATCHING: dict[str, Callable[[Path], Any]] = {
    "health": lambda folder: callbacks.TrainingHealth(folder, report=False),
    "audit": lambda folder: callbacks.PrecisionAudit(run_dir=folder),
}
ORDERS = [order for count in (1, 2) for order in permutations(WATCHING, count)]


class LeftOut(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 else None


class FailsInStep(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        raise KeyError(f"planned, at {loss}")


class FailsBackward(Regression):
    def on_after_backward(self) -> None:
        raise KeyError("planned")


@pytest.mark.parametrize("module", [LeftOut, FailsInStep, FailsBackward, Regression])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_no_mode_stays_behind(order: tuple[str, ...], module: Any, tmp_path: Path) -> None:
    runner = trainer(callbacks=[WATCHING[name](tmp_path) for name in order], max_epochs=2)
    with pytest.raises(KeyError, match="planned") if module in (FailsInStep, FailsBackward) else nullcontext():
        runner.fit(module(), batches())
    assert not is_in_torch_dispatch_mode()
    assert not {"training_step", "backward"} & vars(runner.strategy).keys()
    counted = [callback for callback in runner.callbacks if isinstance(callback, callbacks.TrainingHealth)]
    if counted and (module is Regression or module is LeftOut):
        assert len(counted[0].rows) == 8 * (2 if module is Regression else 1)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_none_is_there_between_the_passes(order: tuple[str, ...], tmp_path: Path) -> None:
    found: list[bool] = []

    class Looks(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.append(is_in_torch_dispatch_mode())

    trainer(callbacks=[WATCHING[name](tmp_path) for name in order]).fit(Looks(), batches())
    assert found == [False] * 8
