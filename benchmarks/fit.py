"""The one way in which every benchmark here trains."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer


def fit(module: LightningModule, data: Any, plugin: Any, steps: int, **more: Any) -> Trainer:
    """``steps`` steps under ``plugin`` (``None``: of the Trainer's own), with nothing written or shown.

    ``more`` are arguments of the Trainer, which is handed back.
    """
    trainer = Trainer(
        **{
            "accelerator": "auto",
            "devices": 1,
            "max_steps": steps,
            "plugins": None if plugin is None else [plugin],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **more,
        }
    )
    trainer.fit(module, data)
    return trainer
