"""A run saved under one strategy goes on under another: what is carried is equal, what is not is said in one line."""

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from lightning_mp.checkpoints import consolidate, kind_of
from support import language
from support.comparing import eps, furthest, of_training
from support.models import InfiniteGradient, same_weights
from support.ranks import Ranks
from support.running import fit
from support.saved import Held, full_state
from support.saving import ResumableBatches
from support.sharded import RATE, WAIT, under
from support.traces import lightning_says

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
#: how long a run is, the step it is saved at, and the steps that overflow: two before, one after
STEPS, AT, OVERFLOWS = 12, 5, (1, 3, 6)
#: all that a scale is made of moves within the run: hysteresis is spent at step 1 and missing at step 6
RULE = LossScaling(init_scale=64.0, hysteresis=2, growth_interval=4)
#: what writes: a name for ``make_strategy`` and its keywords
WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", WAIT), "fsdp2": ("fsdp2", WAIT),
    "fsdp2 file": ("fsdp2", {**WAIT, "save_distributed_checkpoint": False}), "fsdp1": ("fsdp1", WAIT),
    "zero1": ("deepspeed_zero1", WAIT), "zero2": ("deepspeed_zero2", WAIT), "zero3": ("deepspeed_zero3", WAIT),
}  # fmt: skip
READERS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
#: a unit of its own beside the root's, in either model
_WRAPPED = {"held": "model.first", "llama": "LlamaDecoderLayer"}


@dataclass(frozen=True)
class Setting:
    model: str
    mode: str
    pins: dict[str, str] = field(default_factory=dict)


CASES: dict[str, Setting] = {
    "16-mixed": Setting("held", "16-mixed"),
    "32-true": Setting("held", "32-true"),
    "bf16-true": Setting("held", "bf16-true", {"norm": "fp32"}),
    "llama": Setting("llama", "16-mixed", {"*norm*": "fp32"}),
    "half pin": Setting("llama", "16-mixed", {"*norm*": "fp32", "lm_head": "bf16"}),
}


class Carried(Held):
    """Two parameter groups with rates of their own; gradients overflow on the last rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _overflowing(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in made["optimizer"].param_groups]
        return _scheduled(torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), [1e-2, 5e-3])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What the run is made of, the strategy writes."""


class CarriedLanguage(language.Language):
    def __init__(self) -> None:
        super().__init__(language.llama())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _overflowing(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return _scheduled(super().configure_optimizers(), [1e-2])


def _scheduled(optimizer: Any, rates: list[float]) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _overflowing(module: LightningModule, loss: Tensor) -> Tensor:
    last = module.global_rank == module.trainer.world_size - 1
    return InfiniteGradient.apply(loss) if last and module.trainer.global_step in OVERFLOWS else loss


class Watch(Callback):
    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.seen: dict[str, Any] = {"rates": [], "scales": [], "skipped": []}

    def _now(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        plan: Any = trainer.precision_plugin
        return {"weights": full_state(module), "plan": plan.state_dict(), "step": trainer.global_step}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["hosted"] = {
            "wrapped": trainer.strategy.model is not pl_module,
            "group": torch.distributed.is_initialized(),
            "launcher": trainer.strategy.launcher is not None,
        }
        self.seen["start"] = self._now(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        # ZeRO may have split a group: its parts have one rate
        self.seen["rates"].append(sorted({group["lr"] for group in trainer.optimizers[0].param_groups}))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.seen["scales"].append(None if plan.scaler is None else plan.scaler.get_scale())
        self.seen["skipped"].append(plan.step_skipped)
        if self.path is not None and trainer.global_step == AT:
            trainer.save_checkpoint(self.path)
            self.seen["saved"] = self._now(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["end"] = self._now(trainer, pl_module)


def plan_of(case: str) -> MixedPrecisionPlan:
    mode, pins = CASES[case].mode, CASES[case].pins
    scaling = {"loss_scaling": RULE} if mode.startswith("16") else {}
    return MixedPrecisionPlan(mode, pins=pins, **scaling)


def module_of(case: str) -> LightningModule:
    return CarriedLanguage() if CASES[case].model == "llama" else Carried()


def host(name: str, plan: MixedPrecisionPlan, case: str) -> dict[str, Any]:
    """Trainer arguments: ``stock`` and ``auto`` are one device, all else two processes."""
    if name == "stock":
        return {"devices": 1}
    if name == "auto":
        return {"devices": 1, "strategy": make_strategy("auto", plan)}
    strategy, options = WRITERS[name]
    wrap = {"wrap": _WRAPPED[CASES[case].model]} if strategy.startswith("fsdp") else {}
    return under(strategy, plan, **options, **wrap)


@dataclass(frozen=True)
class Saved:
    folder: Path
    case: str
    writer: str

    @property
    def path(self) -> Path:
        return self.folder / self.case / self.writer / "saved.ckpt"

    def run(self) -> dict[str, Any]:
        return _trained(self.case, self.writer, Watch(self.path))


@dataclass(frozen=True)
class Resumed:
    path: Path
    case: str
    reader: str

    def run(self) -> dict[str, Any]:
        return _trained(self.case, self.reader, Watch(), self.path)


@dataclass(frozen=True)
class Refused:
    resumed: Resumed

    def run(self) -> str:
        try:
            self.resumed.run()
        except BaseException as error:  # torch's CheckpointException is no Exception
            return "".join(traceback.format_exception_only(error))
        return "it went on"


def _trained(case: str, name: str, watch: Watch, ckpt_path: Path | None = None) -> dict[str, Any]:
    plan, module = plan_of(case), module_of(case)
    data = ResumableBatches(language.tokens(32) if CASES[case].model == "llama" else None)
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": STEPS, "gradient_clip_val": 0.5}
    options |= {"plugins": [plan], "callbacks": [watch], "ckpt_path": ckpt_path, **host(name, plan, case)}
    with lightning_says() as lines:
        fit(module, data=data, **options)
    return {**watch.seen, "said": lines, "losses": module.losses}


#: what one process writes is a file, whoever reads it; ``auto`` is this package's strategy on one device
SINGLE = ("stock", "auto")
#: (case, writer, reader) in two processes; a pair in the main case, and what pins and other modes may break
TWO = [
    *(("16-mixed", writer, "ddp") for writer in (*SINGLE, *WRITERS)),
    *(("16-mixed", "ddp", reader) for reader in READERS[1:]),
    *(("16-mixed", host, host) for host in ("fsdp2", "fsdp1", "zero3")),
    ("16-mixed", "zero1", "zero2"),
    ("bf16-true", "fsdp2", "ddp"),
    ("llama", "zero3", "fsdp2"),
    *(("half pin", writer, reader) for writer, reader in (("ddp", "zero2"), ("zero2", "fsdp2"), ("fsdp2", "ddp"))),
]
#: read on one device by the strategy that can
ONE = [
    *(("16-mixed", writer, "auto") for writer in ("stock", "fsdp2", "zero2", "zero3")),
    *(("16-mixed", writer, "stock") for writer in ("auto", "fsdp2 file", "fsdp1")),
]
WRITTEN = sorted({(case, writer) for case, writer, _ in (*TWO, *ONE)})
#: readers of a file that lacks a weight, and the weight
LOSERS, LOST = ("ddp", "fsdp2", "fsdp1", "zero2", "zero3"), "model.norm.bias"


class Runs:
    """The runs by rank: one device is this process, all else two of their own. One that reads is written for first."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self._here: dict[Any, Any] = {}

    def saved(self, case: str, writer: str) -> list[dict[str, Any]]:
        return self._run(Saved(self.folder, case, writer), writer)

    def resumed(self, case: str, writer: str, reader: str) -> list[dict[str, Any]]:
        self.saved(case, writer)
        return self._run(Resumed(self.path(case, writer), case, reader), reader)

    def path(self, case: str, writer: str) -> Path:
        return Saved(self.folder, case, writer).path

    def _run(self, run: Saved | Resumed, name: str) -> list[dict[str, Any]]:
        if name not in SINGLE:
            return self.ranks.run(run)
        if run not in self._here:
            self._here[run] = run.run()
        return [self._here[run]] * 2


@pytest.fixture(scope="module")
def runs(ranks: Ranks, folder: Path) -> Runs:
    return Runs(ranks, folder)


def _carries_optimizer(writer: str, reader: str) -> bool:
    """All do but ZeRO, whose pieces only ZeRO of the same kind takes up."""
    kinds = ["zero3" if name == "zero3" else name.startswith("zero") for name in (writer, reader)]
    return kinds[0] == kinds[1]


def _within(case: str) -> float:
    """How far two runs may be apart at the end: the norm that is clipped by is summed in another order elsewhere.

    An optimizer that started anew is further off.
    """
    mode = CASES[case].mode
    # a weight in bf16 may be the next one up or down; those that bf16-true and the half pin store are below 1 / 4
    stored = eps("bf16-true") / 4 if mode == "bf16-true" or case == "half pin" else 0.0
    return stored + of_training(mode if mode != "bf16-true" else "32-true", RATE, STEPS - AT)


@pytest.mark.parametrize(("case", "writer", "reader"), [*TWO, *ONE])
def test_the_run_goes_on_where_it_was_saved(runs: Runs, case: str, writer: str, reader: str) -> None:
    carries, anew = _carries_optimizer(writer, reader), ("starts at zero", "starts from scratch")
    said = [line for line in runs.resumed(case, writer, reader)[0]["said"] if any(words in line for words in anew)]
    assert len(said) == (not carries)
    assert "\n" not in "".join(said)
    for before, after in zip(runs.saved(case, writer), runs.resumed(case, writer, reader), strict=True):
        saved, start = before["saved"], after["start"]
        assert start["step"] == saved["step"] == AT
        assert same_weights(start["weights"], saved["weights"])
        dtypes = {name: tensor.dtype for name, tensor in before["start"]["weights"].items()}
        assert {name: tensor.dtype for name, tensor in after["end"]["weights"].items()} == dtypes
        assert start["plan"] == saved["plan"]
        assert after["end"]["plan"] == before["end"]["plan"]
        assert after["rates"] == before["rates"][AT:]
        assert after["scales"] == before["scales"][AT:]
        assert after["skipped"] == before["skipped"][AT:]
        apart = furthest(after["end"]["weights"], before["end"]["weights"])
        assert apart <= _within(case) if carries else 1e-3 < apart < 1


def test_the_saved_runs_are_what_the_others_are_held_against(runs: Runs) -> None:
    for writer in (*SINGLE, *WRITERS):
        for run in runs.saved("16-mixed", writer):
            assert run["skipped"] == [step in OVERFLOWS for step in range(STEPS)]
            assert run["scales"] == [64.0] * 3 + [32.0] * 3 + [16.0] * 4 + [32.0] * 2
            assert run["saved"]["plan"]["steps"]["skipped_steps"] == 2
            assert len({tuple(rates) for rates in run["rates"]}) == STEPS - len(OVERFLOWS)
            assert not same_weights(run["start"]["weights"], run["saved"]["weights"])


def test_one_device_under_this_packages_strategy_is_lightnings_single_device(runs: Runs) -> None:
    stock, auto = (runs.saved("16-mixed", name)[0] for name in SINGLE)
    assert auto["losses"] == stock["losses"]
    assert same_weights(auto["end"]["weights"], stock["end"]["weights"])
    assert auto["hosted"] == {"wrapped": False, "group": False, "launcher": False}


@pytest.mark.parametrize("reader", LOSERS)
def test_a_weight_that_is_missing_is_named(runs: Runs, tmp_path: Path, reader: str) -> None:
    runs.saved("16-mixed", "stock")
    whole = torch.load(runs.path("16-mixed", "stock"), weights_only=False)
    del whole["state_dict"][LOST]
    torch.save(whole, tmp_path / "lost.ckpt")
    for error in runs.ranks.run(Refused(Resumed(tmp_path / "lost.ckpt", "16-mixed", reader))):
        assert "Error(s) in loading state_dict" in error
        assert LOST in error.splitlines()[-1] or LOST in error.splitlines()[-2]


@pytest.mark.parametrize(("case", "writer"), [pair for pair in WRITTEN if pair[1] not in SINGLE])
def test_consolidated_it_is_what_the_ranks_held(runs: Runs, tmp_path: Path, case: str, writer: str) -> None:
    held = runs.saved(case, writer)[0]["saved"]["weights"]
    path = runs.path(case, writer)
    assert (kind_of(path) != "file") == (writer not in ("ddp", "fsdp2 file", "fsdp1"))
    state = torch.load(consolidate(path, tmp_path / "w.pt"), weights_only=True)
    assert same_weights({name: state[name] for name in held}, held)
    module_of(case).load_state_dict(state, strict=True)
    half = torch.load(consolidate(path, tmp_path / "half.pt", "bf16"), weights_only=True)
    pinned = {name for name, one in state.items() if CASES[case].pins and "norm" in name and one.is_floating_point()}
    assert {name for name, tensor in half.items() if tensor.dtype == torch.float32} == pinned
