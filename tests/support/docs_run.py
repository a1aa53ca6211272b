"""Runs a page: its Python in one namespace, its files and commands in one folder."""

import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import torch
import typer
import yaml
from packaging.requirements import Requirement
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli import app
from lightning_mp.cli.train import run as train
from support.docs import ROOT, Block, commands, sides

PROJECT = Path(__file__).parent / "docs_project"
#: run as they are: they only read
HARMLESS = ("ls", "cat", "tail", "head")
#: of other machines, or of those who work on the project: looked at
LOOKED_AT = ("make", "pip", "torchrun", "srun", "sbatch", "python", "git", ".venv/bin/python", ".venv/bin/mkdocs")
LOOKED_AT += (".venv/bin/ruff",)
#: of a training file
SECTIONS = {"plan", "model", "data", "strategy", "trainer", "callbacks", "seed", "defaults", "run_dir", "ckpt_path"}
_BASE = {
    "plan": {"precision": "bf16-mixed"},
    "model": {"_target_": "my_project.MyModule"},
    "data": {"_target_": "my_project.MyData"},
}


def shown(code: str, real: str, place: str, *, loose: bool = False) -> None:
    """Every line of a text block is a line of what was printed; ``…`` stands for anything, ``loose`` lets numbers."""
    lines = [" ".join(line.split()) for line in real.splitlines()]
    whole = " ".join(" ".join(lines).split())
    for line in filter(None, (" ".join(line.split()) for line in code.splitlines())):
        pattern = ".*".join(map(re.escape, line.split("…")))
        pattern = re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.,e+]+", pattern) if loose else pattern
        found = any(re.search(pattern, one) for one in lines) or ("…" not in line and line in whole)
        assert found, f"{place}: not printed: {line}\n--- printed:\n{real}"


def yaml_file(code: str, block: Block) -> None:
    """Give a YAML block to whom it is for: LightningCLI, a Hydra application, ``train``, or a plan."""
    values: dict[str, Any] = yaml.safe_load(code)
    is_training = set(values) <= SECTIONS or {"plan", "model"} <= set(values)
    path = Path(block.file or "conf/config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    if "class_path" in str(values) or "fit" in values:
        return  # the page's commands give it to LightningCLI
    if "searchpath" in str(values.get("hydra")):
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            plan: Any = OmegaConf.to_container(compose(path.stem).plan, resolve=True)
        assert MixedPrecisionPlan.from_config(plan).policy
    elif "plugins" in values:  # a Trainer's
        from hydra.utils import instantiate

        assert [plugin.policy for plugin in instantiate(values["plugins"])]
    elif is_training:
        whole = {**{key: value for key, value in _BASE.items() if "defaults" not in values}, **values}
        if whole != values:
            path = Path("block.yaml")
            path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        assert train([str(path)], lambda _: None, only_show=True) == 0
    else:
        assert MixedPrecisionPlan.from_config(path).policy


def options_exist(arguments: Sequence[str], block: Block) -> None:
    group: Any = typer.main.get_command(app)
    command = group.commands.get(arguments[0]) if not arguments[0].startswith("-") else group
    assert command is not None, f"{block.place}: no command {arguments[0]!r}"
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    assert set(options) <= known, f"{block.place}: {sorted(set(options) - known)}"


def look_at(program: str, arguments: Sequence[str], block: Block) -> None:
    """What can be seen of a command that is not run: targets of make, extras of pip."""
    assert program in LOOKED_AT, f"{block.place}: nothing looks at {program!r}"
    if program == "make":
        known = set(re.findall(r"^([A-Za-z-]+)(?:: ?| \?=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word.partition("=")[0] for word in arguments} <= known, f"{block.place}: make {arguments}"
    elif program == "pip":
        extras = set(metadata("lightning-mp").get_all("Provides-Extra") or [])
        for word in (word for word in arguments[1:] if not word.startswith("-")):
            requirement = Requirement(re.sub(r"^\.", "lightning-mp", word))
            assert requirement.name != "lightning-mp" or requirement.extras <= extras, f"{block.place}: {word}"


RUN = """\
plan: {precision: 16-mixed}
model: {_target_: my_project.MyModule}
data: {_target_: my_project.MyData}
trainer: {accelerator: cpu, max_epochs: 1}
"""
TWO_STEPS = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.num_sanity_val_steps=0")


@dataclass
class Setup:
    """What a page needs before its blocks run, and how its longer commands are shortened."""

    #: makes files in the present folder, and gives the names that the page takes as known
    prepare: Callable[[], dict[str, Any] | None] = lambda: None
    #: text of the blocks that is another here: sizes of machines that this one is not
    changes: Mapping[str, str] = field(default_factory=dict)
    #: the beginning of a ``lightning-mp`` command: what is added to make it short; the exit status it is to have
    shorter: Mapping[str, Sequence[str]] = field(default_factory=dict)
    status: Mapping[str, int] = field(default_factory=dict)
    #: patterns of ``lightning-mp`` commands, and ``python``, that are for the slow tests; of those that never run here
    slow: Sequence[str] = ("train -m",)
    elsewhere: Sequence[str] = ()
    #: the whole page is for the slow tests; any number of its text blocks will do
    all_slow: bool = False
    loose: bool = False


def run_yaml() -> None:
    Path("run.yaml").write_text(RUN, encoding="utf-8")


def config_json() -> None:
    from transformers import LlamaConfig

    Path("config.json").write_text(LlamaConfig(num_hidden_layers=8).to_json_string(), encoding="utf-8")


def names() -> dict[str, Any]:
    """What the migration pages take as imported, and a project to migrate."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
    from my_project import Block, MyData, MyModule

    import lightning_mp

    run_yaml()
    hosts = (MixedPrecision, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, pl.Trainer, pl.LightningModule)
    return {
        **{name: getattr(lightning_mp, name) for name in lightning_mp.__all__},
        **{one.__name__: one for one in (*hosts, DataLoader, Block, MyData, MyModule)}, "torch": torch,
        "plan": MixedPrecisionPlan("bf16-mixed"), "module": MyModule(), "dataset": MyData().rows,
    }  # fmt: skip


def a_run() -> None:
    """``run.yaml``, and the run in ``runs/x`` that the page goes on from."""
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
    # docs/how-to/compare.md runs the same
    "docs/how-to/pick-a-mode.md": Setup(prepare=run_yaml, elsewhere=("compare",)),
    **dict.fromkeys(
        (f"docs/how-to/{page}.md" for page in ("nan", "out-of-memory", "pins")),
        _SHORT_RUN,
    ),
    "docs/how-to/migrate.md": Setup(prepare=names, shorter={"train": TWO_STEPS}),
    # LongSpec's recipe is run, and looked into, by tests/cli/test_longspec_gloo.py
    "docs/how-to/lora.md": Setup(elsewhere=("train experiment",)),
    "docs/how-to/fsdp2.md": Setup(prepare=names, changes={**_ON_ONE, "s3://bucket": "bucket"}),
    "docs/how-to/deepspeed.md": Setup(prepare=names, changes=_ON_ONE),
    # FP8 on a CPU takes seconds a step: tests/cli/test_compare.py runs both, small or in the slow tests
    "docs/how-to/compare.md": Setup(
        prepare=names,
        changes={"seeds=8, steps=300": "seeds=1, steps=2"},
        shorter={"compare": ("--seeds=1", "--steps=2")},
        slow=("compare",),
        elsewhere=("compare experiment",),
    ),
    # tests/cli/test_advise_run.py advises on an experiment
    "docs/how-to/plan-a-run.md": Setup(
        prepare=config_json, status={"advise --params 70b": 2}, elsewhere=("advise experiment",)
    ),
    "docs/how-to/hydra.md": Setup(
        prepare=a_run,
        shorter={
            "train runs/x/config.yaml run_dir": ("trainer.max_steps=1",),
            **dict.fromkeys(("train trainer", "train run.yaml"), TWO_STEPS),
        },
        slow=("train", "python"),
        elsewhere=("train -m", "compare"),  # run.yaml is for eight devices; docs/how-to/compare.md compares
    ),
    "docs/how-to/lightning-cli.md": Setup(prepare=names, all_slow=True),
    "docs/how-to/does-it-work-with.md": Setup(elsewhere=("consolidate",)),  # tests/docs/test_does_it_work_with.py
    "docs/reference/strategies.md": Setup(prepare=names, changes=_ON_ONE),
}  # fmt: skip


class PageRun:
    """One page in the present folder; ``all_commands`` runs those too that take long."""

    def __init__(self, page: str, *, all_commands: bool) -> None:
        self.setup, self.all_commands = SETUPS.get(page, Setup()), all_commands
        self.namespace: dict[str, Any] = {"__name__": "page"}
        self.printed = ""
        for source in PROJECT.glob("*.py"):
            shutil.copy(source, source.name)
        self.namespace |= self.setup.prepare() or {}

    def block(self, block: Block) -> None:
        code = block.code
        for old, new in self.setup.changes.items():
            code = code.replace(old, new)
        if block.file is not None:
            path = Path(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        if block.language == "python":
            self._python(block, code)
        elif block.language == "diff":
            old, new = sides(block)
            compile(old, f"{block.place} (-)", "exec")
            self._python(block, new)
        elif block.language == "text":
            shown(code, self.printed, block.place, loose=self.setup.loose)
        elif block.language == "yaml":
            yaml_file(code, block)
        elif block.language == "json":
            Path("ds.json").write_text(code, encoding="utf-8")
            assert MixedPrecisionPlan.from_deepspeed(json.loads(code)).deepspeed_notes, block.place
        else:
            assert block.language == "bash", f"{block.place}: nothing runs {block.language or 'no language'}"
            self.printed = ""
            for words in commands(Block(block.page, block.line, block.language, code)):
                self._command(words, block)

    def _python(self, block: Block, code: str) -> None:
        if block.file is not None:
            compile(code, block.place, "exec")  # a command of the page runs it
            return
        with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a page shows what stock hosts warn about
            exec(compile(code, block.place, "exec"), self.namespace)
        self.printed = printed.getvalue()

    def _command(self, words: Sequence[str], block: Block) -> None:
        program, *arguments = words
        script = program == "python" and arguments[0].endswith(".py")
        if program == "lightning-mp":
            self._lightning_mp(arguments, block)
        elif script and program in self.setup.slow and not self.all_commands:
            return
        elif script or program in HARMLESS:
            command = [sys.executable if script else program, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, (block.place, done.stderr)
            self.printed += done.stdout
        else:
            look_at(program, arguments, block)

    def _lightning_mp(self, arguments: list[str], block: Block) -> None:
        options_exist(arguments, block)
        line = " ".join(arguments)
        extra = [text for start, texts in self.setup.shorter.items() if line.startswith(start) for text in texts]
        training = arguments[0] == "train" and not {"--help", "--show"} & set(arguments)
        if _any(self.setup.elsewhere, line) or (_any(self.setup.slow, line) and not self.all_commands):
            if not training:
                return
            extra = ["--show"]  # composed and checked, for every run of a sweep
        elif training:
            extra = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", *extra]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(app, [*arguments, *extra])
        status, output = result.exit_code, result.output + ("" if result.exception is None else repr(result.exception))
        expected = next((status for start, status in self.setup.status.items() if line.startswith(start)), 0)
        assert status == expected, (block.place, line, status, output)
        self.printed += output


def _any(patterns: Sequence[str], line: str) -> bool:
    return any(re.match(pattern, line) for pattern in patterns)
