"""DeepSpeed's ZeRO stages under a plan, in two real processes: what they train is what DDP trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mp import LossScaling, NonFinite, NonFiniteError, make_strategy
from lightning_mp.deepspeed import strategy as forward
from support.collectives import Moved
from support.comparing import of_sums, of_training, same, same_runs
from support.deepspeed_json import WHOLE_FP16, fp16_supported
from support.fsdp2_halves import Penalised, Text, text
from support.models import FEATURES, HIDDEN, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.sharded import BAD_RANK, HOSTS, PINS, RATE, STAGES, Both, Ranked, Stopped, on, refused, trained

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo

BAD = 2
Small = partial(Ranked, optimizer="adamw")
OVERFLOWS = partial(Small, bad=(BAD,))
#: A step on a piece of a tensor rounds its last fp32 bits another way than a step on the whole of it.
LAST_BITS = of_training("32-true", RATE)


class LeftOut(Ranked):
    """Leaves the rest of its first epoch out in the midst of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 7) else None


class ByHand(Ranked):
    """Manual optimization, clipped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(optimizer="sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class Later(Ranked):
    """Makes its net in ``configure_model``, partitioned under stage 3."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            layers = nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
            self.net = nn.Sequential(*layers)


def _both(stage: str, mode: str, module: Any = OVERFLOWS, options: Any = (), **strategy: Any) -> Both:
    return Both(mode, module, dict(options), strategy, f"zero{stage}")


CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
WINDOWS = {"accumulate_grad_batches": 3, "max_epochs": 2}
GROWS = {"loss_scaling": LossScaling(init_scale=8.0, growth_interval=2)}
WITHOUT_NORM = {"zero_optimization": {"compute_grad_norm": False}}
RUNS: dict[str, Both] = {
    **{f"{stage} 16-mixed": _both(stage, "16-mixed") for stage in STAGES},
    "2 bf16-true": _both("2", "bf16-true"),
    "1 16-true, a pin splits the group": _both("1", "16-true", options={"pins": PINS}),
    "3 32-true": _both("3", "32-true", Small),
    **{
        f"{stage} accumulated and clipped": _both(stage, "16-mixed", partial(Ranked, optimizer="sgd"), CLIPPED)
        for stage in ("2", "3", "2_offload")
    },
    **{f"{stage} the scale grows": _both(stage, "16-mixed", Small, GROWS) for stage in ("2", "3")},
    "2 left out in a window": _both("2", "bf16-mixed", partial(LeftOut, optimizer="adamw"), WINDOWS),
    **{f"{stage} by hand": _both(stage, "16-mixed", ByHand) for stage in ("2", "3")},
    "3 made partitioned": _both("3", "16-mixed", Later),
    "3 made partitioned, 32-true": _both("3", "32-true", Later),
    "2 without DeepSpeed's norm": _both("2", "16-mixed", config=WITHOUT_NORM),
}


def _is_ddps(result: dict[str, Any]) -> bool:
    """DeepSpeed takes a norm in every step, so that an overflow shows; DDP's is taken to clip by."""
    ours, theirs = ({key: run[key] for key in run if key != "norms"} for run in (result["sharded"], result["ddp"]))
    clips = any(map(math.isfinite, result["ddp"]["norms"]))
    norms = not clips or same(result["sharded"]["norms"], result["ddp"]["norms"], of_sums(32))
    return norms and same_runs(ours, theirs, LAST_BITS)


@pytest.mark.older_cpu
@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_ddps(ranks: Ranks, name: str) -> None:
    one, other = ranks.run(RUNS[name])
    for result in (one, other):
        assert _is_ddps(result)
        dtypes = {key: weight.dtype for key, weight in result["ddp"]["weights"].items()}
        assert {key: weight.dtype for key, weight in result["sharded"]["weights"].items()} == dtypes
        assert any(result["sharded"]["skipped"]) == (RUNS[name].module is OVERFLOWS)
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


@pytest.mark.parametrize(("stage", "mode"), [("2", "16-true"), ("3", "16-mixed")])
def test_with_fp16_enabled_in_the_json_nothing_changes(ranks: Ranks, stage: str, mode: str) -> None:
    """As on CUDA, where DeepSpeed takes fp16: its casts are kept out all the same."""
    for result in ranks.run(AsOnCuda(_both(stage, mode))):
        assert _is_ddps(result)


@dataclass(frozen=True)
class AsOnCuda:
    """A comparison where DeepSpeed has fp16."""

    both: Both

    def run(self) -> dict[str, Any]:
        with fp16_supported():
            return self.both.run()


@pytest.mark.parametrize(("stage", "how"), [("2", "gradient"), ("3", "batch")])
def test_the_error_names_the_guilty_rank_on_every_rank(ranks: Ranks, stage: str, how: str) -> None:
    one, other = ranks.run(Stopped("bf16-mixed", how, NonFinite(max_consecutive=2), HOSTS[f"zero{stage}"]))
    assert one == other
    assert (one["rank"], one["step"]) == (BAD_RANK, 4)
    assert one["module"] == {"gradient": "net.3", "batch": "net.0"}[how]


class OverflowsOnce(Ranked):
    """Has a gradient that is not finite in batch 2, and is finite when that batch is run again."""

    again = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == BAD and not self.again:
            self.again = True
            hook = self.net[3].weight.register_hook(lambda gradient: (hook.remove(), gradient * math.inf)[1])
        return loss


@dataclass(frozen=True)
class Named:
    """The module that the error names."""

    def run(self) -> str | None:
        try:
            trained("bf16-mixed", HOSTS["zero3"](), OverflowsOnce(), nonfinite="raise")
        except NonFiniteError as error:
            return error.module
        return "none was raised"


def test_stage_3_names_the_module_of_a_gradient_that_does_not_come_again(ranks: Ranks) -> None:
    assert ranks.run(Named()) == ["net.3"] * 2


# ------------------------------------------------------------------ checkpoints

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 1 / (2 + n)]),
    "onecycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=12),  # two phases, as many as groups
}


class Groups(Ranked):
    """Two param groups, the first of which a pin splits under the true modes, and a schedule with an entry a group."""

    def __init__(self, schedule: str, bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad)
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        first = [*self.net[0].parameters(), *self.net[1].parameters()]
        groups = [{"params": first, "lr": 1e-2}, {"params": list(self.net[3].parameters()), "lr": 2e-3}]
        optimizer = AdamW(groups, eps=1e-4)
        schedule = {"scheduler": SCHEDULES[self.schedule](optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@dataclass(frozen=True)
class Resumed:
    """A run that saves after step 4, another that goes on from there, and DDP's; step 1 is skipped."""

    stage: str
    mode: str
    schedule: str
    folder: Path

    def run(self) -> dict[str, Any]:
        folder = self.folder / f"{self.stage} {self.mode}"

        def run(host: dict[str, Any], bad: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
            scaling = LossScaling(init_scale=256.0, growth_interval=3, hysteresis=2)
            options |= {"loss_scaling": scaling, "pins": PINS, "data": ResumableBatches()}
            return trained(self.mode, host, Groups(self.schedule, bad), **options)

        zero = HOSTS[f"zero{self.stage}"]
        whole = run(zero(), (1,), callbacks=[SaveAt(folder, 4)])
        return {"whole": whole, "resumed": run(zero(), ckpt_path=folder / "4.ckpt"), "ddp": run(HOSTS["ddp"](), (1,))}


@pytest.mark.parametrize(("stage", "mode", "schedule"), [("2", "16-true", "lambda"), ("3", "16-mixed", "onecycle")])
def test_a_resumed_run_is_the_whole_one_and_ddps(
    ranks: Ranks, tmp_path: Path, stage: str, mode: str, schedule: str
) -> None:
    for result in ranks.run(Resumed(stage, mode, schedule, tmp_path)):
        whole, again = result["whole"], result["resumed"]
        assert same_weights(whole["weights"], again["weights"])
        assert whole["counts"] == again["counts"] == (7, 1)
        assert all(whole[key][4:] == again[key] for key in ("scales", "lrs", "skipped"))
        assert same(whole["weights"], result["ddp"]["weights"], LAST_BITS)
        assert whole["lrs"] == result["ddp"]["lrs"]


# ------------------------------------------------------------------ what DeepSpeed is given, and leaves behind


@dataclass(frozen=True)
class Engine:
    """What of a real project's fp16 block the engine holds, and what DeepSpeed left behind in this process."""

    def run(self) -> dict[str, Any]:
        from deepspeed.runtime.engine import DeepSpeedEngine

        found: dict[str, Any] = {}

        class Asks(Ranked):
            def on_train_start(self) -> None:
                engine: Any = self.trainer.strategy.deepspeed_engine
                scaler = engine.optimizer.loss_scaler
                found["block"] = {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16}
                found["scaler"] = (scaler.cur_scale, scaler.dynamic)

        plan = plan_for("16-mixed", LossScaling.deepspeed(at_min="hold"))
        with fp16_supported():
            strategy = make_strategy("deepspeed_zero3", plan, config={"fp16": WHOLE_FP16})
            fit(Asks(optimizer="adamw"), plugins=[plan], **on(strategy))
        found["cast"] = DeepSpeedEngine._cast_module_mixed_precision.__qualname__
        return found | {"linear": nn.functional.linear.__module__, "autocast": torch.is_autocast_enabled("cpu")}


def test_a_real_fp16_block_reaches_the_engine_and_nothing_is_left_in_the_process(ranks: Ranks) -> None:
    for found in ranks.run(Engine()):
        assert found["block"] == WHOLE_FP16
        assert found["scaler"] == (2.0**16, True)
        assert found["cast"] == "DeepSpeedEngine._cast_module_mixed_precision"
        assert (found["linear"], found["autocast"]) == ("torch._C._nn", False)


# ------------------------------------------------------------------ what is gathered in half precision

#: else ZeRO-3 keeps small parameters gathered, in fp32
NOTHING_WHOLE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@dataclass(frozen=True)
class HalfGathers:
    """A run that gathers in half precision what autocast alone computes with, and one that gathers as stored."""

    def run(self) -> dict[str, Any]:
        moved = Moved()
        half = self._run(moved)
        with mock.patch.object(forward.half_weights, "survey", return_value=[]):
            return {"half": half, "gathered": sum(moved.steps[2]["gathered"]), "stored": self._run(Moved())}

    def _run(self, moved: Moved) -> dict[str, Any]:
        return trained(
            "bf16-mixed", HOSTS["zero3"](config=NOTHING_WHOLE), Text("llama"), data=text(), callbacks=[moved]
        )


@dataclass(frozen=True)
class ReadsAWeight:
    """What is said of it under ZeRO-3."""

    def run(self) -> str:
        return refused(lambda: trained("16-mixed", HOSTS["zero3"](config=NOTHING_WHOLE), Penalised()))


def test_stage_3_gathers_in_half_precision_and_trains_what_it_did(ranks: Ranks) -> None:
    """2 bytes an element of the weights that qualify, 4 another."""
    for result in ranks.run(HalfGathers()):
        assert result["gathered"] == 319_360
        assert same(result["half"], result["stored"])
    for said in ranks.run(ReadsAWeight()):
        assert "net.2.weight" in said
        assert "pins={'net.2': 'fp32'}" in said
