"""What is looked at in a block that is not run as it stands: files of other hosts, and commands for other machines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from packaging.requirements import Requirement

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli import app
from lightning_mp.cli.train import run as train
from support.docs import ROOT, Block

#: run as they are: they only read
HARMLESS = ("ls", "cat", "tail", "head")

_BASE = {
    "plan": {"precision": "bf16-mixed"},
    "model": {"_target_": "my_project.MyModule"},
    "data": {"_target_": "my_project.MyData"},
}

# ---------------------------------------------------------------------- outputs


def shown(code: str, real: str, place: str, *, loose: bool = False) -> None:
    """Every line of a text block is a line of what was printed; ``…`` stands for anything, ``loose`` lets numbers."""
    lines = [" ".join(line.split()) for line in real.splitlines()]
    whole = " ".join(" ".join(lines).split())
    for line in filter(None, (" ".join(line.split()) for line in code.splitlines())):
        pattern = ".*".join(map(re.escape, line.split("…")))
        pattern = re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.,e+]+", pattern) if loose else pattern
        found = any(re.search(pattern, one) for one in lines) or ("…" not in line and line in whole)
        assert found, f"{place}: not printed: {line}\n--- printed:\n{real}"


# ---------------------------------------------------------------------- files


def yaml_file(code: str, block: Block) -> None:
    """Give a YAML block to whom it is for."""
    values = yaml.safe_load(code)
    assert isinstance(values, dict), block.place
    for fits, check in _YAMLS:
        if fits(values):
            check(code, values, block)
            return
    raise AssertionError(f"{block.place}: nothing reads this YAML: {', '.join(values)}")


def _training_file(code: str, values: dict[str, Any], block: Block) -> None:
    """Composed and checked as ``lightning-mp train`` does it before a model is built."""
    path = Path(block.file or "block.yaml")
    whole = {**{key: value for key, value in _BASE.items() if "defaults" not in values}, **values}
    # as it is written where it is whole, so that lines in errors would be right
    path.write_text(code if whole == values else yaml.safe_dump(whole), encoding="utf-8")
    said: list[str] = []
    assert train([str(path)], said.append, only_show=True) == 0
    assert said, block.place


def _hydra_project(code: str, values: dict[str, Any], block: Block) -> None:
    """A config of a Hydra application that has the package's groups on its search path."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    path = Path(block.file or "conf/config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
        config = compose(path.stem)
    plan: Any = OmegaConf.to_container(config.plan, resolve=True)
    assert MixedPrecisionPlan.from_config(plan).policy


def _lightning_cli(code: str, values: dict[str, Any], block: Block) -> None:
    """A file of the page's, which its commands give to LightningCLI."""
    assert block.file is not None, block.place
    Path(block.file).write_text(code, encoding="utf-8")


def _plan_file(code: str, values: dict[str, Any], block: Block) -> None:
    path = Path(block.file or "plan.yaml")
    path.write_text(code, encoding="utf-8")
    assert MixedPrecisionPlan.from_config(path).policy


def _is_training_file(values: dict[str, Any]) -> bool:
    parts = ("plan", "model", "data", "strategy", "trainer", "callbacks", "seed", "defaults", "run_dir", "ckpt_path")
    return set(values) <= set(parts) or {"plan", "model"} <= set(values)


_YAMLS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[str, dict[str, Any], Block], None]], ...] = (
    (lambda values: "class_path" in str(values) or "fit" in values, _lightning_cli),
    (lambda values: "searchpath" in str(values.get("hydra")), _hydra_project),
    (_is_training_file, _training_file),
    (lambda values: "precision" in values, _plan_file),
)


def json_file(code: str, block: Block) -> None:
    """JSON; a DeepSpeed one is read into a plan."""
    values = json.loads(code)
    assert isinstance(values, dict), block.place
    assert MixedPrecisionPlan.from_deepspeed(values).deepspeed_notes, block.place


# ---------------------------------------------------------------------- commands


def options_exist(arguments: Sequence[str], block: Block) -> None:
    """Whether ``lightning-mp`` has that command and those options."""
    group: Any = typer.main.get_command(app)
    command = group.commands.get(arguments[0]) if not arguments[0].startswith("-") else group
    assert command is not None, f"{block.place}: no command {arguments[0]!r}"
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    assert set(options) <= known, f"{block.place}: {sorted(set(options) - known)}"


def command(program: str, arguments: Sequence[str], block: Block) -> None:
    """Look at a command that this machine cannot or should not run."""
    assert program in _COMMANDS, f"{block.place}: nothing looks at {program!r}"
    _COMMANDS[program](list(arguments), block)


def _make(arguments: list[str], block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in arguments:
        name, equals, _ = word.partition("=")
        assert name in (variables if equals else targets), f"{block.place}: make {word}"


def _pip(arguments: list[str], block: Block) -> None:
    """Every extra that is asked for exists."""
    from importlib.metadata import metadata

    extras = set(metadata("lightning-mp").get_all("Provides-Extra") or [])
    assert arguments[0] == "install", block.place
    for word in (word for word in arguments[1:] if not word.startswith("-")):
        requirement = Requirement(re.sub(r"^\.", "lightning-mp", word))
        if requirement.name == "lightning-mp":
            assert requirement.extras <= extras, f"{block.place}: {word}"


def _torchrun(arguments: list[str], block: Block) -> None:
    from torch.distributed.run import get_args_parser

    script = get_args_parser().parse_args(arguments).training_script
    assert script.endswith(".py"), block.place


def _srun(arguments: list[str], block: Block) -> None:
    rest = [word for word in arguments if not word.startswith("--")]
    assert rest[0] == "python", block.place
    assert rest[1].endswith(".py"), block.place


def _sbatch(arguments: list[str], block: Block) -> None:
    assert all(word.endswith(".sbatch") for word in arguments), block.place


def _python_of_the_project(arguments: list[str], block: Block) -> None:
    """``.venv/bin/python``, for those who work on the project: a module that exists, and pytest's files and markers."""
    from importlib.util import find_spec

    assert arguments[0] == "-m", block.place
    assert find_spec(arguments[1]) is not None, block.place
    for word in arguments[2:]:
        if "/" in word:
            assert (ROOT / word.partition("::")[0]).exists(), f"{block.place}: {word}"


def _tool(arguments: list[str], block: Block) -> None:
    for word in arguments:
        if "/" in word and not word.startswith("-"):
            assert (ROOT / word.partition("::")[0]).exists(), f"{block.place}: {word}"


_COMMANDS: dict[str, Callable[[list[str], Block], None]] = {
    "make": _make,
    "pip": _pip,
    "torchrun": _torchrun,
    "srun": _srun,
    "sbatch": _sbatch,
    "python": _python_of_the_project,
    ".venv/bin/python": _python_of_the_project,
    ".venv/bin/mkdocs": _tool,
    ".venv/bin/ruff": _tool,
    "git": _tool,
}
