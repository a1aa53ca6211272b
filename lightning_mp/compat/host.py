"""Which of Lightning's two copies this process uses. Nothing is imported to tell."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

#: the Trainer package of each copy, and its Fabric package
COPIES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def imported() -> list[str]:
    """The copies that the program has imported, in that order."""
    return [name for name, module in [*sys.modules.items()] if name in COPIES and module]


@cache
def host() -> str:
    """The copy that was imported first when this was first asked; where none was, one that is installed."""
    return next(iter(imported()), "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


def other() -> str:
    """The copy that is not used."""
    return next(copy for copy in COPIES if copy != host())
