"""Runs the files of ``examples/`` as a user does, and looks at what they hand to ``Trainer.fit``."""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, Trainer

from support.launching import environment

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
#: how warnings are printed, Lightning's (without a category) and Python's
_WARNING = re.compile(r"^\S+\.py:\d+: (?:\w*Warning: )?(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a finished example printed, and the folder it ran in."""

    output: str
    errors: str
    folder: Path

    def find(self, pattern: str) -> tuple[str, ...]:
        """The groups of the one place in ``output`` that matches."""
        (found,) = re.finditer(pattern, self.output)
        return found.groups()


def path_of(number: str) -> Path:
    """The one example of that number or beginning."""
    (path,) = (path for path in FILES if path.name.startswith(number))
    return path


def run(number: str, folder: Path, *arguments: str, timeout: float = 150) -> Ran:
    """Run an example to its end, in ``folder``; it must succeed, and leave nothing beside itself."""
    before = _contents()
    child = subprocess.Popen(
        [sys.executable, str(path_of(number)), *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):  # the processes it started have its number as their group's
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, f"{output}\n{errors}"
    assert _contents() == before
    return Ran(output, errors, folder)


def _contents() -> set[Path]:
    return {path for path in FOLDER.rglob("*") if "__pycache__" not in path.parts}


def warned(ran: Ran, ignored: Iterable[str]) -> list[str]:
    """The warnings on stderr that are not among pytest's ``ignore:message:category``."""
    known = [line.split(":")[1] for line in ignored if line.startswith("ignore:")]
    return [said for said in _WARNING.findall(ran.errors) if not any(re.match(message, said) for message in known)]


def code_of(path: Path) -> tuple[str, list[str]]:
    """An example's docstring, and the lines below it."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None
    return docstring, text.splitlines()[first.end_lineno :]


def load(number: str) -> SimpleNamespace:
    """What an example defines; nothing is trained, and no compiled file is left."""
    path = path_of(number)
    return SimpleNamespace(**runpy.run_path(str(path), run_name=path.stem))


class _Handed(Exception):  # noqa: N818  no error, but the end of what is looked at
    pass


def handed_to_fit(path: Path, arguments: tuple[str, ...], patch: pytest.MonkeyPatch) -> tuple[Trainer, Any, Any]:
    """Trainer, module and one batch that an example would begin to train with; None for a batch only a fit can make."""

    @functools.wraps(Trainer.fit)  # LightningCLI makes options of what it takes
    def fit(trainer: Trainer, model: Any, data: Any = None, *_: Any, datamodule: Any = None, **__: Any) -> None:
        raise _Handed(trainer, model, data or datamodule)

    patch.setattr(Trainer, "fit", fit)
    patch.setattr(Trainer, "validate", lambda *_, **__: [{}])
    patch.setattr(sys, "argv", [str(path), *arguments])
    patch.setenv("HYDRA_FULL_ERROR", "1")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything leaves is taken out again
        patch.setenv(name, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(_Handed) as handed:
            runpy.run_path(str(path), run_name="__main__")
    trainer, model, data = handed.value.args
    return trainer, model, _batch(data)


def _batch(data: Any) -> Any:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    return None if data is None else next(iter(data))
