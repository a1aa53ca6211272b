"""What the commands that look at one run share: its config, composed and checked as ``lightning-mp train`` does."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_mp.cli.training import application, check, compose, targets
from lightning_mp.cli.training.compose import Composed
from lightning_mp.errors import Faults


@contextmanager
def composed(arguments: Sequence[str], faults: Faults, config_dirs: Sequence[Path]) -> Generator[Composed]:
    """What ``[CONFIG] key=value …`` describes, while the modules of its project can be imported."""
    path, overrides = compose.split(arguments)
    with targets.importable(path):
        (job,) = compose.compose(path, overrides, faults, config_dirs=config_dirs)
        yield job


def checked(job: Composed, command: str, faults: Faults, **asked: Any) -> dict[str, Any]:
    """The plain values of ``job``, which writes to its own folder; ``asked`` are keywords of :func:`check.check`."""
    folder = application.run_dir(job, command, faults)
    application.set_run_dir(job, folder)
    with job.under_hydra(folder):
        return check.check(job, faults, **asked)


def some(arguments: Sequence[str], command: str, nothing: str, faults: Faults) -> None:
    """Note ``nothing``, where there is nothing that describes a run."""
    if not arguments:
        fix = f"lightning-mp {command} run.yaml, or experiment=NAME"
        faults.add(nothing, "a YAML file, key=value", fix)
