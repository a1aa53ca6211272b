"""What each page of the documentation needs before its blocks run, and how its longer commands are shortened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support.docs import DOCS

Namespace = dict[str, Any]

RUN = """\
plan: {precision: 16-mixed}
model: {_target_: my_project.MyModule}
data: {_target_: my_project.MyData}
trainer: {accelerator: cpu, max_epochs: 1}
"""
TWO_STEPS = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.num_sanity_val_steps=0")


@dataclass(slots=True)
class Setup:
    """One page's table."""

    #: makes files in the present folder, and gives the names that the page takes as known
    prepare: Callable[[], Namespace | None] | None = None
    #: text of the blocks that is another here: sizes of machines that this one is not
    changes: Mapping[str, str] = field(default_factory=dict[str, str])
    #: the beginning of a ``lightning-mp`` command, and what is added to make it short
    shorter: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    #: patterns of ``lightning-mp`` commands that start processes of their own or take long: in the slow tests
    slow: Sequence[str] = ("train -m",)
    #: patterns of ``lightning-mp`` commands for other machines: composed and checked, never run
    elsewhere: Sequence[str] = ()
    #: the beginning of a ``lightning-mp`` command, and the exit status it is to have
    status: Mapping[str, int] = field(default_factory=dict[str, int])
    #: where text blocks come from, in order, if not from what was printed before them
    texts: list[Callable[[], str]] = field(default_factory=list[Callable[[], str]])


def run_yaml() -> None:
    """``run.yaml`` of a small project."""
    from pathlib import Path

    Path("run.yaml").write_text(RUN, encoding="utf-8")


def config_json() -> None:
    """``config.json`` of a small model, as transformers writes one."""
    from pathlib import Path

    from transformers import LlamaConfig

    Path("config.json").write_text(LlamaConfig(num_hidden_layers=8).to_json_string(), encoding="utf-8")


def names() -> Namespace:
    """What the migration pages take as imported, and a project to migrate."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
    from my_project import Block, MyData, MyModule

    import lightning_mp

    run_yaml()
    hosts = (MixedPrecision, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
    ours = {name: getattr(lightning_mp, name) for name in lightning_mp.__all__}
    return {
        **ours,
        **{host.__name__: host for host in hosts},
        "Trainer": pl.Trainer,
        "LightningModule": pl.LightningModule,
        "DataLoader": DataLoader,
        "torch": torch,
        "Block": Block,
        "MyData": MyData,
        "MyModule": MyModule,
        "plan": lightning_mp.MixedPrecisionPlan("bf16-mixed"),
        "module": MyModule(),
        "dataset": MyData().rows,
    }


# ---------------------------------------------------------------------- accelerate


def make_model() -> nn.Module:
    """A small net."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Eight batches of a sum to learn."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def accelerate_loop() -> Namespace:
    """The names of the loop that the page starts from."""
    import accelerate
    from accelerate import utils

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handlers = ("GradScalerKwargs", "AutocastKwargs", "DistributedDataParallelKwargs")
    return {
        **names(),
        **{name: getattr(utils, name) for name in handlers},
        "Accelerator": accelerate.Accelerator,
        "make_model": make_model, "make_loader": make_loader, "loss_of": loss_of,
        "model": model, "optimizer": optimizer, "loader": make_loader(),
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100),
    }  # fmt: skip


# ---------------------------------------------------------------------- single pages


def saved_batch() -> Namespace:
    """A batch that ``NonFiniteGuard`` saved in a real run, under the name that the page gives it."""
    from pathlib import Path

    from lightning.pytorch import Trainer
    from my_project import MyData, MyModule

    from lightning_mp.callbacks import NonFiniteGuard

    module, quiet = MyModule(), {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    Trainer(callbacks=[NonFiniteGuard(run_dir=".")], max_epochs=1, **quiet).fit(module, MyData(bad_row=20))
    (saved,) = Path("nonfinite").glob("*.pt")
    saved.rename("nonfinite/step_000017_rank1.pt")
    return {"module": module}


def a_run() -> None:
    """``run.yaml``, and the run in ``runs/x`` that the page goes on from."""
    from lightning_mp.cli.train import run as train

    run_yaml()
    quiet = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
    assert train(["run.yaml", "run_dir=runs/x", "trainer.max_epochs=1", *quiet], lambda _: None) == 0


def plan_error() -> str:
    """The error that the README shows."""
    from lightning_mp import MixedPrecisionPlan, PlanError

    scaling: Any = {"growth_factor": 0.5}
    try:
        MixedPrecisionPlan("fp16-mixd", loss_scaling=scaling, pins={"*norm*": "fp23"})  # type: ignore[arg-type]
    except PlanError as error:
        return str(error)
    raise AssertionError


def deepspeed_error() -> str:
    """The error that the strategies' page shows."""
    from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError, make_strategy

    fp16 = {"enabled": True, "inital_scale_power": 12, "loss_scale_window": 500}
    try:
        plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(growth_interval=1000))
        make_strategy("deepspeed_zero2", plan, config={"fp16": fp16})
    except PlanError as error:
        return str(error)
    raise AssertionError


def demo_table() -> str:
    """The README's measured figures as the demo prints them: means, ratios, differences and intervals are its own."""
    from lightning_mp import PrecisionPolicy
    from lightning_mp.comparison.results import Comparison, PlanResult, RunResult, compare_losses

    # of each seed: final loss, tokens a second, bytes at the peak
    half = 59774356
    measured = {
        "fp32": ((5.97722, 2530, 95448548), (6.03795, 1182, 83790228), (5.93732, 1836, 83790228)),
        "bf16": ((5.97724, 1327, half), (6.03707, 641, half), (5.93764, 992, half)),
        "bf16-ckpt": ((5.97724, 608, 28730516), (6.03707, 449, 28730516), (5.93764, 622, 28730516)),
        "fp16": ((5.97722, 712, half), (6.05016, 998, half), (5.93728, 788, half)),
    }
    plans: list[PlanResult] = []
    for name, figures in measured.items():
        runs = (RunResult(seed, (), loss, rate, "tokens", peak) for seed, (loss, rate, peak) in enumerate(figures))
        plans.append(PlanResult(name, PrecisionPolicy(), tuple(runs)))
    losses = [(plan.name, {run.seed: run.final_loss for run in plan.runs}) for plan in plans]
    differences = tuple(compare_losses(losses[0], other, None) for other in losses[1:])
    return str(Comparison(tuple(plans), differences, (0, 1, 2), 40, 4, {"machine": {"type": "cpu"}}))


_ON_ONE = {
    'strategy="mp_fsdp2", devices=8)\nwith': 'strategy="mp_fsdp2", devices=1, max_steps=2)\nwith',
    "devices=8": "devices=1",
}
_SYMPTOMS = sorted(f"docs/how-to/{path.name}" for path in (DOCS / "how-to").glob("*.md"))

SETUPS: dict[str, Setup] = {
    # LongSpec's recipe is run, and looked into, by tests/training/test_longspec_gloo.py
    "README.md": Setup(
        prepare=names,
        texts=[demo_table, plan_error],
        shorter={"train": TWO_STEPS, "compare": ("--seeds=1", "--steps=2")},
        slow=("train experiment", "compare"),
        elsewhere=("train experiment=longspec",),
    ),
    "docs/quickstart.md": Setup(
        prepare=names,
        shorter={"train": ("trainer.max_steps=3",), "compare": ("--seeds=1", "--steps=2")},
        slow=("train", "compare"),
    ),
    # FP8 on a CPU takes seconds a step: tests/cli/test_compare.py runs both, small or in the slow tests
    "docs/compare.md": Setup(
        prepare=names,
        changes={"seeds=8, steps=300": "seeds=1, steps=2"},
        shorter={"compare": ("--seeds=1", "--steps=2")},
        elsewhere=("compare experiment",),
    ),
    "docs/planner.md": Setup(prepare=config_json, status={"advise --params 70e9": 2}, slow=("advise experiment",)),
    "docs/modes.md": Setup(prepare=run_yaml, shorter={"train": TWO_STEPS}),
    "docs/configs.md": Setup(
        prepare=a_run,
        shorter={**dict.fromkeys(("train trainer", "train run"), TWO_STEPS), "compare": ("--seeds=1", "--steps=2")},
        slow=("train", "compare"),
    ),
    "docs/strategies.md": Setup(prepare=names, changes=_ON_ONE, texts=[deepspeed_error]),
    "docs/health.md": Setup(prepare=saved_batch),
    "docs/migrating/lightning.md": Setup(prepare=names),
    "docs/migrating/accelerate.md": Setup(prepare=accelerate_loop),
    "docs/migrating/deepspeed.md": Setup(prepare=names),
    "docs/longspec.md": Setup(elsewhere=("train experiment",)),
    "docs/lightning_cli.md": Setup(prepare=names),
    **dict.fromkeys(_SYMPTOMS, Setup(prepare=run_yaml, shorter={"train": TWO_STEPS})),
}


def setup_of(page: str) -> Setup:
    """The page's own table, or an empty one."""
    from copy import copy

    setup = copy(SETUPS.get(page, Setup()))
    setup.texts = list(setup.texts)
    return setup
