"""peft's adapters are merged under ZeRO-3 as under DDP: in a hook, in a gathering of the user's own, after the run."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mp import MixedPrecisionPlan
from support import hf
from support.comparing import of_training, same
from support.ranks import Ranks
from support.running import trainer
from support.sharded import under, whole

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo
RATE = 1e-2
LAST_BITS = of_training("32-true", RATE)
#: ZeRO-3 keeps small weights gathered between steps, unless it is told otherwise
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Tuned(LightningModule):
    """Validates with merged adapters, and takes them out again to train."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.llama(lora=True)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(hf.loss_of(self.model, batch).item())

    def on_validation_start(self) -> None:
        self.model.merge_adapter()

    def on_validation_end(self) -> None:
        self.model.unmerge_adapter()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=RATE)


def _gathered(module: LightningModule) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0)


def _merged(strategy: str, *, gathers: bool = False, **options: Any) -> dict[str, Any]:
    module, plan = Tuned(), MixedPrecisionPlan("32-true")
    host = under(strategy, plan, **options)
    trainer(max_epochs=2, num_sanity_val_steps=0, **host).fit(module, hf.token_batches(), hf.token_batches())
    with _gathered(module) if gathers else nullcontext():
        module.model = module.model.merge_and_unload()
    return {"losses": module.losses, "weights": whole(module)}


def _runs() -> list[dict[str, Any]]:
    return [
        _merged("ddp"),
        _merged("deepspeed_zero3"),
        _merged("deepspeed_zero3", config=SPLIT),
        _merged("deepspeed_zero3", config=SPLIT, gathers=True),
    ]


def test_adapters_are_merged_as_under_ddp(ranks: Ranks) -> None:
    for ddp, *split in ranks.call(_runs):
        assert not any("lora" in name for name in ddp["weights"])
        for run in split:
            assert same(run, ddp, LAST_BITS)
