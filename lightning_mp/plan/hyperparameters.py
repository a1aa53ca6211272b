"""The plan in a Trainer's loggers, so that runs can be filtered by it.

It is one more hyperparameter, ``precision_plan``. No user's code is called for it, and no user's module is given it.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, cast

import yaml

from lightning_mp.compat.lightning import (
    CSVLogger,
    Logger,
    TensorBoardLogger,
    Trainer,
    hyperparameters_argument,
    rank_zero_info,
)
from lightning_mp.policy import PrecisionPolicy

KEY = "precision_plan"
#: beside a logger's own hparams.yaml, where a module may not be given the plan
FILE = f"{KEY}.yaml"
_HEAD = "# The precision plan of this run, written by lightning_mp.\n"


def log_plan(policy: PrecisionPolicy, trainer: Trainer) -> None:
    """Give ``policy`` to each logger of Lightning's, and to each logger of a class that extends one.

    A logger that fails is named, and the run goes on.
    """
    if not trainer.is_global_zero:
        return
    # under one key, beside the module's own: loggers without nested names make precision_plan/loss_scaling of it
    values = policy.to_dict() | {"pins": str({pin.pattern: pin.dtype for pin in policy.pins})}
    may_be_loaded = any(map(_takes_more, (trainer.lightning_module, getattr(trainer, "datamodule", None))))
    for logger in trainer.loggers:
        _log_to(logger, values, may_be_loaded=may_be_loaded)


def _log_to(logger: Any, values: dict[str, Any], *, may_be_loaded: bool) -> None:
    """Give ``values`` to one logger; to a file beside hparams.yaml, if a module ``may_be_loaded`` from that."""
    try:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)) and may_be_loaded:
            _write_file(logger.log_dir, values)
        elif isinstance(logger, TensorBoardLogger):
            # its log_hyperparams would write an hp_metric, a second one or one of a run without hyperparameters
            cast("Any", logger).hparams[KEY] = values
        else:
            _call_lightnings(logger, values)
    except Exception as error:  # of a server that is away, or of a parameter that may not change
        rank_zero_info(f"{type(logger).__name__} has no {KEY}: {type(error).__name__}: {error}")


def _takes_more(owner: Any) -> bool:
    """True if ``load_from_checkpoint(hparams_file=...)`` hands a module or data module keys that it does not name.

    Without hyperparameters of its own it has no use for such a file.
    """
    if owner is None or not owner.hparams:
        return False
    parameters = inspect.signature(type(owner).__init__).parameters
    any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return any_key or KEY in parameters or hyperparameters_argument(owner) in parameters


def _call_lightnings(logger: Any, values: dict[str, Any]) -> None:
    """Call ``log_hyperparams`` of the logger's class in Lightning, past what a user's class makes of it.

    A user's own logger may read its own keys, or keep what the last call gave it: it is not called.
    """
    package = Logger.__module__.rpartition(".")[0]
    for cls in type(logger).__mro__:
        within = cls.__module__.startswith(f"{package}.") and cls.__module__ != Logger.__module__
        if within and "log_hyperparams" in vars(cls):
            cls.log_hyperparams(logger, {KEY: values})
            return


def _write_file(folder: Any, values: dict[str, Any]) -> None:
    """Write the plan into a logger's local ``folder``; a file of somebody else's of that name stays."""
    if "://" in os.fspath(folder):
        return
    path = Path(folder) / FILE
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_HEAD):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HEAD + yaml.safe_dump({KEY: values}, sort_keys=False), encoding="utf-8")
