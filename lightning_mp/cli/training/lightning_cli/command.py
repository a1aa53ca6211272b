"""``lightning-mp cli``: LightningCLI with a plan, for any LightningModule by ``class_path``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_mp.cli.training.application import ended, environment_kept
from lightning_mp.cli.training.build import running
from lightning_mp.cli.training.lightning_cli.arguments import config_files
from lightning_mp.cli.training.lightning_cli.plan_cli import SUBJECT, PlanCLI
from lightning_mp.cli.training.targets import importable
from lightning_mp.errors import Fault, Faults, MissingExtraError, PlanError, one_line

#: where seed_everything leaves the seed
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


class _Command(PlanCLI):
    """The command: there an error of the user's own code is a fault too; a script of theirs shows its traceback."""

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (PlanError, MissingExtraError):
            raise
        except Exception as error:  # whatever the code that is built raises
            cause = error.__cause__ or error
            said = f"{type(cause).__name__}: {one_line(cause)}"
            raise PlanError([Fault(said, "parts that can be built", "fix what it names")], SUBJECT) from error


def run(arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """``lightning-mp cli``: any LightningModule and LightningDataModule by ``class_path``; returns the exit status.

    The seed is 0 where none is given, as for ``lightning-mp train``.

    Raises:
        PlanError: what was given cannot run; every fault at once, before a model is built.
        MissingExtraError: an optional package that is needed is not installed.
        NonFiniteError: the run met more non-finite steps than its plan allows.
        SystemExit: help or a config was asked for, and printed.
    """
    kwargs: dict[str, Any] = {"prog": "lightning-mp cli", "exit_on_error": False}
    with importable(next(iter(config_files(arguments)), None)), environment_kept(*_SEEDS), running(Faults(SUBJECT)):
        cli = _Command(args=list(arguments), seed_everything_default=0, parser_kwargs=kwargs)
    folder = cli.trainer.log_dir  # every rank asks: rank 0 tells the others
    if cli.trainer.is_global_zero and cli.subcommand == "fit":
        say(ended(folder, cli.trainer.global_step))
    return 1 if cli.trainer.interrupted else 0
