"""Parameter names as the LightningModule has them, whatever wrapped it while it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mp.checkpoints.formats import CheckpointFormatError
from lightning_mp.modules.patterns import plain_name


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` under plain names, in its order.

    Raises:
        CheckpointFormatError: two of its names are one without the wrappers.
    """
    plain: dict[str, Any] = {}
    for name, value in state.items():
        short = plain_name(name)
        if short in plain:
            raise CheckpointFormatError(
                f"two entries called {short!r} once wrappers are left out of their names",
                "one entry a name",
                "rename the module that bears a wrapper's name",
            )
        plain[short] = value
    return plain
