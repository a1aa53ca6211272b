"""What each page of the documentation needs before its blocks run, and how its longer commands are shortened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

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
    #: the whole page starts processes or takes long: in the slow tests
    all_slow: bool = False
    #: any number of a text block will do: losses and speeds are those of the machine that the page was written on
    loose: bool = False


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


def a_run() -> None:
    """``run.yaml``, and the run in ``runs/x`` that the page goes on from."""
    from lightning_mp.cli.train import run as train

    run_yaml()
    quiet = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
    assert train(["run.yaml", "run_dir=runs/x", "trainer.max_epochs=1", *quiet], lambda _: None) == 0


_ON_ONE = {
    'strategy="mp_fsdp2", devices=8)\nwith': 'strategy="mp_fsdp2", devices=1, max_steps=2)\nwith',
    "devices=8": "devices=1",
}
_SHORT_RUN = Setup(prepare=run_yaml, shorter={"train": TWO_STEPS})

SETUPS: dict[str, Setup] = {
    "README.md": Setup(prepare=names, changes=_ON_ONE),
    "docs/tutorial.md": Setup(all_slow=True, loose=True),
    "docs/how-to/index.md": _SHORT_RUN,
    "docs/how-to/pick-a-mode.md": Setup(
        prepare=run_yaml, shorter={"compare": ("--seeds=1", "--steps=2")}, slow=("compare",)
    ),
    **dict.fromkeys(
        (f"docs/how-to/{page}.md" for page in ("nan", "out-of-memory", "pins")),
        _SHORT_RUN,
    ),
    "docs/how-to/migrate.md": Setup(prepare=names, shorter={"train": TWO_STEPS}),
    # LongSpec's recipe is run, and looked into, by tests/cli/test_longspec_gloo.py
    "docs/how-to/lora.md": Setup(elsewhere=("train experiment",)),
    "docs/how-to/fsdp2.md": Setup(prepare=names, changes=_ON_ONE),
    "docs/how-to/deepspeed.md": Setup(prepare=names, changes=_ON_ONE),
    # FP8 on a CPU takes seconds a step: tests/cli/test_compare.py runs both, small or in the slow tests
    "docs/how-to/compare.md": Setup(
        prepare=names,
        changes={"seeds=8, steps=300": "seeds=1, steps=2"},
        shorter={"compare": ("--seeds=1", "--steps=2")},
        elsewhere=("compare experiment",),
    ),
    "docs/how-to/plan-a-run.md": Setup(
        prepare=config_json, status={"advise --params 70e9": 2}, slow=("advise experiment",)
    ),
    "docs/how-to/hydra.md": Setup(
        prepare=a_run,
        shorter={
            "train runs/x/config.yaml run_dir": ("trainer.max_steps=1",),
            **dict.fromkeys(("train trainer", "train run.yaml", "train -m"), TWO_STEPS),
            "compare": ("--seeds=1", "--steps=2"),
        },
        slow=("train", "compare"),
        elsewhere=("train -m",),  # run.yaml is for eight devices
    ),
    "docs/how-to/lightning-cli.md": Setup(prepare=names),
    "docs/reference/strategies.md": Setup(prepare=names, changes=_ON_ONE),
}  # fmt: skip


def setup_of(page: str) -> Setup:
    """The page's own table, or an empty one."""
    return SETUPS.get(page, Setup())
