"""A language model of transformers, by name and config, as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mp.errors import MissingExtraError


class CausalLM(LightningModule):
    """Next-token training of any causal language model of transformers, from its config, with random weights.

    A batch is int64 of (batch, context + 1). AdamW; the rate rises over ``warmup_steps``, then falls to a tenth along a
    cosine until the run's last step.

    Args:
        architecture: transformers' ``model_type``: ``llama``, ``gpt2``, ``qwen2``, ….
        config: fields of that architecture's config.
        lr: the highest learning rate.
        betas: AdamW's.
        weight_decay: AdamW's, on every parameter.
        warmup_steps: optimizer steps until ``lr`` is reached.

    Raises:
        MissingExtraError: transformers is not installed.
        ValueError: no such architecture.
    """

    def __init__(
        self,
        architecture: str,
        config: Mapping[str, Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise MissingExtraError("transformers", "hf", "lightning_mp.training.language.CausalLM") from error
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
        settings = AutoConfig.for_model(architecture, **{**ids, **config})
        self.model: nn.Module = AutoModelForCausalLM.from_config(settings)
        self._lr, self._betas, self._weight_decay = lr, (betas[0], betas[1]), weight_decay
        self._warmup_steps = warmup_steps

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean next-token loss in nats."""
        return self._loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean next-token loss as ``val/loss``."""
        self.log("val/loss", self._loss(batch), batch_size=batch.shape[0], prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW and its schedule, a step of it an optimizer step."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        options: dict[str, Any] = {"lr": self._lr, "betas": self._betas, "weight_decay": self._weight_decay}
        # fused: the others divide by an eps that fp16 rounds to 0
        optimizer = torch.optim.AdamW(parameters, **options, fused=True)
        warm_up = max(1, self._warmup_steps)
        rest = max(1, int(self.trainer.estimated_stepping_batches) - warm_up)
        schedulers: list[Any] = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm_up, total_iters=warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rest, eta_min=self._lr / 10),
        ]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[warm_up])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self.model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
