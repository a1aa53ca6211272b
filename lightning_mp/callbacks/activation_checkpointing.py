"""Activation checkpointing for a project on stock plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from lightning_mp.callbacks.acting import ActingCallback
from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.errors import Faults
from lightning_mp.modules import checkpointing
from lightning_mp.policy import Checkpointing


class ActivationCheckpointing(ActingCallback):
    """Recomputes the activations of the chosen modules in the backward pass, with any strategy that keeps the module.

    Arguments are those of :class:`~lightning_mp.policy.Checkpointing`. Modules that are only made in
    ``configure_model`` do not exist yet when callbacks are set up, and cannot be matched.

    Raises:
        PlanError: a pattern that matches nothing, or a MixedPrecisionPlan beside it (use its ``checkpointing=``).
    """

    plan_field = "checkpointing"

    def __init__(
        self,
        modules: Any,
        *,
        mode: Literal["full", "selective"] = "full",
        every: int = 1,
        save_ops: Iterable[str] | None = None,
        preserve_rng: bool = True,
    ) -> None:
        super().__init__()
        ops = None if save_ops is None else tuple(save_ops)
        self.config = Checkpointing(modules=modules, mode=mode, every=every, save_ops=ops, preserve_rng=preserve_rng)

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Checkpoint the matching modules."""
        chosen = checkpointing.select(pl_module, self.config, faults)
        faults.raise_if_any()
        return checkpointing.apply(pl_module, chosen, self.config).undo
