"""Two stages in two processes: what one process does that accumulates as many batches as there are micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from support.comparing import same
from support.pipeline import MODULES, WIDTH, Fit, Staged, equal
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

#: of the norm over all stages, which is summed in another order than on one process
OF_THE_NORM = 1e-6
PINS = ("pins", {"*norm*": "fp32", "lm_head": "fp32"})
ALONE = ((1, "blocks.0.up.weight"), (2, "head.bias"))


class FrozenFirst(Staged):
    """Nothing is trained in the first stage."""

    def build(self) -> None:
        super().build()
        self.blocks[:2].requires_grad_(False)


class FrozenLast(Staged):
    """Nothing is trained in the last stage."""

    def build(self) -> None:
        super().build()
        self.blocks[2:].requires_grad_(False)
        self.head.requires_grad_(False)


class Unused(Staged):
    """A layer that no forward pass reaches."""

    def build(self) -> None:
        super().build()
        self.blocks[1].extra = nn.Linear(3, 3)


class Thaws(FrozenFirst):
    """The first stage is trained from the second epoch on, and not in the third."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    def on_train_epoch_start(self) -> None:
        self.blocks[:2].requires_grad_(self.current_epoch == 1)
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": [*self.blocks[:2].parameters()], "lr": 1e-3})


class EveryStep(Staged):
    """Its rate changes by step; gradients are set to zero, not to None."""

    def configure_optimizers(self) -> Any:
        (optimizer,), (scheduler,) = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Unseen(Staged):
    """No hook looks at the gradients that are to be set to zero."""

    on_before_zero_grad = LightningModule.on_before_zero_grad


class Plateau(Staged):
    """Its rate changes by what is validated."""

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Penalty(Staged):
    """Its loss is of the last stage's weights too."""

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().pipeline_loss(output, target) + 0.1 * self.head.weight.square().sum()


class Norms(Staged):
    """Batch norms in all stages, of which one is left as it is in each epoch."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)

    def on_train_epoch_start(self) -> None:
        self.blocks[1].norm.eval()


BY_VALUE = (("gradient_clip_algorithm", "value"),)
EPOCHS = (("max_epochs", 3),)

FITS = {
    "1f1b": Fit(),
    "a frozen first stage, clipped by value": Fit(
        "16-mixed", module=FrozenFirst, scale=64.0, clip=0.01, arguments=BY_VALUE
    ),
    "frozen by epoch": Fit("bf16-mixed", "interleaved_1f1b", Thaws, arguments=EPOCHS),
    "what is unused, the last step of fewer batches": Fit("16-mixed", module=Unused, scale=64.0, steps=3, accumulate=2),
    "batch norms, epochs cut short": Fit(module=Norms, arguments=(("limit_train_batches", 2), ("max_epochs", 2))),
    "interleaved, bf16, two batches a step": Fit("bf16-mixed", "interleaved_1f1b", accumulate=2),
    "gpipe, fp16, one stage overflows alone": Fit("16-mixed", "gpipe", scale=64.0, bad=ALONE),
    "a batch norm, validated": Fit(module="batch norm"),
}
SLOW = {
    "made on the meta device": Fit(
        "16-mixed", "interleaved_1f1b", "meta", scale=64.0, plan=(("pins", {"*norm*": "fp32"}),)
    ),
    "fp16 from 2^24": Fit("16-mixed", module="llama", steps=16),
    "gpipe": Fit(schedule="gpipe", accumulate=2),
    "interleaved, fp16": Fit("16-mixed", "interleaved_1f1b", scale=64.0, bad=ALONE),
    "GPT-2, interleaved, bf16": Fit("bf16-mixed", "interleaved_1f1b", "gpt2"),
    "Llama with pins and checkpointing": Fit(
        "bf16-mixed", "1f1b", "llama", plan=(PINS, ("checkpointing", "*.layers.*"))
    ),
    "bf16-true with pins": Fit("bf16-true", "1f1b", "llama", plan=(("pins", {"*norm*": "fp32"}),)),
    "gradients that nobody sees": Fit(module=Unseen, accumulate=2, arguments=(("max_epochs", 2),)),
    "a frozen last stage": Fit("16-mixed", module=FrozenLast, scale=64.0),
    "rates by step": Fit(module=EveryStep, steps=3, accumulate=2),
    "rates by loss": Fit(module=Plateau, arguments=EPOCHS),
    "a penalty on weights": Fit(schedule="interleaved_zero_bubble", module=Penalty),
    "what is unused, zero bubble": Fit(schedule="interleaved_zero_bubble", module=Unused),
    "batch norms, interleaved": Fit("bf16-mixed", "interleaved_1f1b", Norms, arguments=(("num_sanity_val_steps", 2),)),
    "batch norms, checkpointed": Fit(module=Norms, plan=(("checkpointing", "Block"),)),
    "overfitted": Fit(arguments=(("overfit_batches", 2), ("max_epochs", 2))),
    "anomalies looked for": Fit(arguments=(("detect_anomaly", True),)),
    "validated within the epoch": Fit(accumulate=2, arguments=(("val_check_interval", 2), ("inference_mode", False))),
    "16-true": Fit("16-true", scale=64.0),
    "zero bubble": Fit("bf16-mixed", "interleaved_zero_bubble", plan=(("checkpointing", "Block"),)),
    "zero bubble, Llama": Fit("16-mixed", "interleaved_zero_bubble", "llama", scale=64.0),
}


@pytest.mark.parametrize("name", [*FITS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fit_in_stages_is_the_fit_on_one_process_bit_for_bit(name: str, ranks: Ranks) -> None:
    fit = {**FITS, **SLOW}[name]
    alone = equal(fit, ranks)
    if fit.bad:
        assert alone["counts"] == (2, 2)


def test_gradients_are_clipped_by_the_norm_over_all_stages(ranks: Ranks) -> None:
    fit = Fit("16-mixed", scale=64.0, clip=0.1)
    results, alone = ranks.run(fit), fit.alone()
    assert [result["norm"] for result in results] == [pytest.approx(alone["norm"], rel=OF_THE_NORM)] * 2
    assert same(results[0]["weights"], alone["weights"], OF_THE_NORM)
    unclipped = replace(fit, clip=None).alone()
    assert not same(results[0]["weights"], unclipped["weights"], 1e-3)


def test_a_rank_holds_the_numbers_of_its_own_stage(ranks: Ranks) -> None:
    results, whole = ranks.run(Fit()), MODULES["blocks"]()
    numbers = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    for rank, result in enumerate(results):
        held = sum(numbers[name] for name in result["gradients"][0])
        gone = len(numbers) - len(result["gradients"][0])
        assert result["held"] == held + gone, rank  # one number stands for each parameter that is elsewhere
