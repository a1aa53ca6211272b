"""LightningCLI under a plan: ``PlanCLI`` for scripts, and what ``lightning-mp cli`` runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mp.compat.deferred import fetch
from lightning_mp.errors import MissingExtraError

if TYPE_CHECKING:
    from lightning_mp.cli.training.lightning_cli.command import run
    from lightning_mp.cli.training.lightning_cli.plan_cli import PlanCLI, SavePlanConfig

try:
    import_module("docstring_parser")  # what the help says of each field
    import_module("jsonargparse")
except ImportError as _error:
    raise MissingExtraError("jsonargparse", "cli", "LightningCLI") from _error

_HOMES = {"PlanCLI": "plan_cli", "SavePlanConfig": "plan_cli", "run": "command"}

__all__ = ["PlanCLI", "SavePlanConfig", "run"]


def __getattr__(name: str) -> Any:
    """Made on first use, of the copy of Lightning that the program imports."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fetch(f"{__name__}.{_HOMES[name]}", name)
