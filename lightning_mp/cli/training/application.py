"""``lightning-mp train``: arguments to one run, or to several that are then compared."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.cli.training import compose, targets
from lightning_mp.cli.training.compose import SUBJECT, Composed
from lightning_mp.errors import Faults, MissingExtraError, PlanError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightning_mp.cli.training.build import Regime

CONFIG = "config.yaml"
#: how the processes that a run starts know its folder
RUN_DIR = "LIGHTNING_MP_RUN_DIR"
_KEYWORDS = ("last", "best", "hpc", "registry")
_LONGEST_NAME = 120
Say = Callable[[str], None]


def train(
    arguments: Sequence[str],
    say: Say,
    *,
    multirun: bool = False,
    config_dirs: Sequence[Path] = (),
    only_show: bool = False,
) -> int:
    """Compose ``[CONFIG] key=value …``, check all of it, then train; returns the exit status.

    Raises:
        PlanError: what was given cannot run; every fault at once, before a model is built.
        MissingExtraError: an optional package that is needed is not installed.
        NonFiniteError: the run met more non-finite steps than its plan allows.
    """
    path, overrides = compose.split(arguments)
    faults = Faults(SUBJECT)
    with targets.importable(path):
        jobs = compose.compose(path, overrides, faults, config_dirs=config_dirs, multirun=multirun)
        name = _name(path, overrides)
        sweep = bool(jobs[0].swept)
        root = run_dir(jobs[0], name, faults)
        for job in jobs:
            set_run_dir(job, root / _job_name(job.swept) if sweep else root)
        with redirect_stdout(sys.stderr) if only_show else nullcontext():  # what hosts print is no part of the config
            checked = _check_all(jobs, faults)
        if only_show:
            say("---\n".join(_as_yaml(config) for config, _ in checked).rstrip())
            return 0
        if sweep:
            return _sweep(path, jobs, config_dirs, root, say)
        ((config, regime),) = checked
        return _run(config, regime, say)


def _check_all(jobs: Sequence[Composed], faults: Faults) -> list[tuple[dict[str, Any], Regime]]:
    from lightning_mp.cli.training import build, check

    found = list[tuple[dict[str, Any], Any]]()
    for job in jobs:
        mine = Faults(SUBJECT)
        with job.under_hydra(Path(job.config.run_dir)):
            config = check.check(job, mine)
        _check_settings(config, mine)
        regime = build.regime(config, job.places, mine)
        faults.extend(fault for fault in mine.found if fault not in faults.found)
        found.append((config, regime))
    faults.raise_if_any()
    return cast("list[tuple[dict[str, Any], Regime]]", found)


def _check_settings(config: dict[str, Any], faults: Faults) -> None:
    seed = config.get("seed")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**32):
        faults.add(f"seed={seed!r}", "an integer from 0 to 2**32 - 1, or null", "write seed=0")
    check_checkpoint(config.get("ckpt_path"), faults)


def check_checkpoint(checkpoint: object, faults: Faults) -> None:
    """Note a checkpoint to resume from that is not there."""
    # with a colon it is an address (s3://…) or a model of a registry
    if checkpoint is None or checkpoint in _KEYWORDS or ":" in str(checkpoint):
        return
    if not Path(str(checkpoint)).exists():
        faults.add(f"ckpt_path={checkpoint}, which does not exist", "a checkpoint, or 'last'", "check the path")


# ---------------------------------------------------------------------- where a run writes


def _name(path: Path | None, overrides: Sequence[str]) -> str:
    chosen = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")]
    return _file_name(chosen[-1]) if chosen else "train" if path is None else path.stem


def run_dir(job: Composed, name: str, faults: Faults) -> Path:
    """The folder that ``job`` asks for, as ``run_dir`` or to Hydra; else a new one below ``runs/``."""
    inherited, hydra = os.environ.get(RUN_DIR), job.whole.hydra
    folder = Path(inherited) if inherited else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    asked = [(job.config, "run_dir", "run_dir")]
    if not inherited:
        kind = "sweep" if job.swept else "run"
        asked.insert(0, (hydra[kind], "dir", f"hydra.{kind}.dir"))
    for section, key, path in asked:
        with job.under_hydra(folder):
            folder = _folder(section, key, f"{path}{job.places.of(path)}", faults) or folder
    return folder


def _folder(section: DictConfig, key: str, shown: str, faults: Faults) -> Path | None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        given = None if OmegaConf.is_missing(section, key) else section.get(key)
    except OmegaConfBaseException as error:
        faults.add(f"{shown}: {str(error).partition(chr(10))[0]}", "a folder", "give every ${...} a target")
        return None
    return None if given is None else Path(str(given))


def set_run_dir(job: Composed, folder: Path) -> None:
    """``run_dir`` is ``folder``, whatever was written."""
    from omegaconf import open_dict

    with open_dict(job.config):
        job.config.run_dir = str(folder)


def _job_name(swept: Sequence[str]) -> str:
    return _file_name(",".join(swept))[:_LONGEST_NAME]


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "=,.-_+" else "_" for letter in text)


def _as_yaml(config: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config))


# ---------------------------------------------------------------------- one run


def _run(config: dict[str, Any], regime: Regime, say: Say) -> int:
    from lightning_mp.cli.training import build
    from lightning_mp.compat.lightning import rank_zero_only

    faults, folder = Faults(SUBJECT), Path(config["run_dir"])
    build.seed(config)
    with run_folder(folder):
        trainer = build.trainer(regime.trainer, faults)
        model, data = build.parts(config, faults)
        if getattr(rank_zero_only, "rank", 0) == 0:
            folder.mkdir(parents=True, exist_ok=True)
            name = CONFIG
            if (folder / CONFIG).exists():
                if config.get("ckpt_path"):
                    name = beside(CONFIG, lambda other: (folder / other).exists())
                else:
                    say(f"{folder} holds an earlier run, whose checkpoints stay: run_dir=... keeps the two apart")
            (folder / name).write_text(_as_yaml(config), encoding="utf-8")
        with build.running(faults):
            trainer.fit(model, **data, ckpt_path=config.get("ckpt_path"))
    if trainer.is_global_zero:
        page = folder / "report.html"
        say(ended(folder, trainer.global_step) + (f", {page}" if page.exists() else ""))
    return 1 if trainer.interrupted else 0


def ended(folder: Path | str | None, steps: int) -> str:
    """What a command says at the end of a run: where it wrote, and how many steps it made."""
    return f"{folder}: {steps} step{'s' * (steps != 1)}"


def beside(config: str, exists: Callable[[str], bool]) -> str:
    """What the config of a run that goes on is called, in the folder of the first: ``config_2.yaml``, …."""
    stem, dot, suffix = config.rpartition(".")
    names = (f"{stem}_{number}{dot}{suffix}" for number in itertools.count(2))
    return next(name for name in names if not exists(name))


@contextmanager
def run_folder(folder: Path) -> Generator[None]:
    """Processes that Lightning starts for the other ranks write to the same folder."""
    with environment_kept(RUN_DIR):
        os.environ[RUN_DIR] = str(folder)
        yield


@contextmanager
def environment_kept(*names: str) -> Generator[None]:
    """Environment variables as they were, whatever is done to them inside."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------- several


def _sweep(path: Path | None, jobs: Sequence[Composed], config_dirs: Sequence[Path], root: Path, say: Say) -> int:
    """Each run in a process of its own: one that fails or runs out of memory leaves the others alone."""
    failed = 0
    for number, job in enumerate(jobs, 1):
        say(f"[{number}/{len(jobs)}] {' '.join(job.swept)}")
        folder = str(job.config.run_dir).replace("\\", "\\\\").replace("'", "\\'")
        options = [part for each in config_dirs for part in ("--config-dir", str(each))]
        kept = [text for text in job.arguments if text.partition("=")[0].lstrip("+") != "run_dir"]
        arguments = [*([] if path is None else [str(path)]), *kept, f"++run_dir='{folder}'"]
        command = [sys.executable, "-m", "lightning_mp", "train", *options, *arguments]
        failed += subprocess.run(command, check=False).returncode != 0
    _compare([Path(str(job.config.run_dir)) for job in jobs], root, say)
    if failed:
        say(f"{failed} of {len(jobs)} runs failed")
    return 1 if failed else 0


def _compare(folders: Sequence[Path], root: Path, say: Say) -> None:
    from lightning_mp.monitor.report import write_report
    from lightning_mp.monitor.report.load import is_run

    written = [folder for folder in folders if is_run(folder)]
    try:
        if written:
            say(f"compared: {write_report(written, root / 'report.html')}")
        else:
            say("no run wrote metrics, so there is nothing to compare: add TrainingHealth to the callbacks")
    except (MissingExtraError, PlanError) as error:
        say(f"not compared: {error}")
