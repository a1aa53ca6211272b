"""Parameter names as the LightningModule has them, whatever wrapped it while it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mp.checkpoints.formats import CheckpointFormatError

# Not "module": none of the strategies here leaves that one behind, and a LightningModule may well call its model so.
_WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """``name`` without the parts that FSDP, ``torch.compile``, Fabric and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


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
