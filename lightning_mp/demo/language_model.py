"""A language model of transformers, by name and config, as a LightningModule."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat import quietly
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import MissingExtraError, PlanError, did_you_mean, one_line

_HERE = "lightning_mp.demo.language_model.CausalLM"


class CausalLM(LightningModule):
    """Next-token training of any causal language model of transformers, from its config, with random weights.

    A batch is int64 of (batch, context + 1). AdamW; the rate rises over ``warmup_steps``, then falls to a tenth along a
    cosine until the run's last step.

    Args:
        architecture: transformers' ``model_type``: ``llama``, ``gpt2``, ``qwen2``, ….
        config: fields of that architecture's config; ``use_cache`` is off unless it says so.
        lora: fields of peft's ``LoraConfig``, to train the adapters alone. ``None`` trains all parameters.
        lr: the highest learning rate.
        betas: AdamW's.
        weight_decay: AdamW's, on every parameter that is trained.
        warmup_steps: optimizer steps until ``lr`` is reached.

    Raises:
        MissingExtraError: transformers is not installed, or, with ``lora``, peft.
        PlanError: no such architecture, or ``lora`` has a field that ``LoraConfig`` lacks, or a value that it refuses.
    """

    def __init__(
        self,
        architecture: str,
        config: Mapping[str, Any],
        *,
        lora: Mapping[str, Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
        with quietly():  # transformers imports torchao where it is installed
            try:
                from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
            except ImportError as error:
                raise MissingExtraError("transformers", "hf", _HERE) from error
            if architecture not in CONFIG_MAPPING:
                fix = did_you_mean(architecture, CONFIG_MAPPING)
                raise PlanError.of(f"architecture={architecture!r} is no model_type of transformers", fix, "CausalLM")
            settings = AutoConfig.for_model(architecture, **{**ids, **config})
            model: nn.Module = AutoModelForCausalLM.from_config(settings)
        self.model = model if lora is None else _with_lora(model, lora)
        self._lr, self._betas, self._weight_decay = lr, (betas[0], betas[1]), weight_decay
        self._warmup_steps = warmup_steps

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean next-token loss, in nats."""
        return self._loss(batch)

    def pipeline_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids and, for each, the next token, both (batch, context)."""
        return batch[:, :-1], batch[:, 1:]

    def pipeline_loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean next-token loss, in nats, of logits (batch, context, vocabulary)."""
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean next-token loss as ``val/loss``."""
        self.log("val/loss", self._loss(batch), batch_size=batch.shape[0], prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return a fused AdamW and its schedule, which steps with each optimizer step."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        options: dict[str, Any] = {"lr": self._lr, "betas": self._betas, "weight_decay": self._weight_decay}
        # fused, because other implementations divide by an eps that fp16 rounds to 0
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
        tokens, wanted = self.pipeline_batch(batch)
        return self.pipeline_loss(self.model(input_ids=tokens).logits, wanted)


def _with_lora(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """Return ``model`` with peft's adapters. All other parameters are frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError("peft", "hf", f"lora= of {_HERE}") from error
    try:
        return get_peft_model(cast("Any", model), cast("Any", LoraConfig)(**{"task_type": "CAUSAL_LM", **lora}))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise PlanError.of(f"lora={dict(lora)!r}: {one_line(error)}", "see peft's LoraConfig", "CausalLM") from error
