"""LightningCLI under a plan: ``PlanCLI`` for scripts, and what ``lightning-mp cli`` runs."""

from importlib import import_module

from lightning_mp.errors import MissingExtraError

try:
    import_module("docstring_parser")  # what the help says of each field
    import_module("jsonargparse")
except ImportError as _error:
    raise MissingExtraError("jsonargparse", "cli", "LightningCLI") from _error

from lightning_mp.cli.training.lightning_cli.command import run
from lightning_mp.cli.training.lightning_cli.plan_cli import PlanCLI, SavePlanConfig

__all__ = ["PlanCLI", "SavePlanConfig", "run"]
