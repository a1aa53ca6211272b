"""Two stages in two processes, and four in four: what one process does that accumulates a batch a micro-batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mp import MixedPrecisionPlan, make_strategy
from support.comparing import eps, same
from support.pipeline import GPT2, OF_A_SUM, ROWS, VOCABULARY, WIDTH, Fit, Llama, OnMeta, Staged, equal
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo
PINS = ("pins", {"*norm*": "fp32", "lm_head": "fp32"})
ALONE = ((1, "blocks.0.up.weight"), (2, "head.bias"))


class FrozenFirst(Staged):
    def build(self) -> None:
        super().build()
        self.blocks[:2].requires_grad_(False)


class Unused(Staged):
    def build(self) -> None:
        super().build()
        self.blocks[1].extra = nn.Linear(3, 3)


class Thaws(FrozenFirst):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    def on_train_epoch_start(self) -> None:
        self.blocks[:2].requires_grad_(self.current_epoch == 1)
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": [*self.blocks[:2].parameters()], "lr": 1e-3})


class Padded(Llama):
    def pipeline_batch(self, batch: Any) -> Any:
        mask = batch[2].new_ones(batch[2].shape)
        mask[:, -2:] = batch[2][:, :1] % 2
        return (batch[2], mask), batch[2]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=inputs[0], attention_mask=inputs[1]).logits

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[2])


class Qwen3(Llama):
    def build(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
        heads = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
        own = {"use_sliding_window": True, "sliding_window": 2, "layer_types": kinds, "tie_word_embeddings": False}
        self.model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **own)).train()


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
}
SLOW = {
    "made on the meta device": Fit(
        "16-mixed", "interleaved_1f1b", OnMeta, scale=64.0, plan=(("pins", {"*norm*": "fp32"}),)
    ),
    "GPT-2, interleaved, bf16": Fit("bf16-mixed", "interleaved_1f1b", GPT2),
    "Llama with pins and checkpointing": Fit("bf16-mixed", "1f1b", Llama, plan=(PINS, ("checkpointing", "*.layers.*"))),
    "Llama, padded": Fit("bf16-mixed", "interleaved_1f1b", Padded, steps=2),
    "batch norms, interleaved": Fit("bf16-mixed", "interleaved_1f1b", Norms, arguments=(("num_sanity_val_steps", 2),)),
    "validated within the epoch": Fit(accumulate=2, arguments=(("val_check_interval", 2), ("inference_mode", False))),
    "16-true": Fit("16-true", scale=64.0),
    "two kinds of attention": Fit(module=Qwen3, steps=2),
}
SHARD = (("shard", True),)
#: after the third batch, of windows of two
INSIDE = (("val_check_interval", 3),)
IN_FOUR = {
    "four stages, gpipe, one overflows alone": Fit("16-mixed", "gpipe", stages=4, scale=64.0, bad=ALONE),
    "replicas, clipped, bf16": Fit("bf16-mixed", replicas=2, clip=0.1, accumulate=2),
    "replicas, Llama, interleaved, fp16": Fit("16-mixed", "interleaved_1f1b", Llama, replicas=2, scale=2.0**12),
    "sharded, accumulated, one stage overflows alone": Fit(
        "16-mixed", "gpipe", replicas=2, options=SHARD, scale=64.0, bad=ALONE, accumulate=2, steps=8
    ),
    "sharded, validated inside a window": Fit(replicas=2, options=SHARD, accumulate=2, steps=6, arguments=INSIDE),
    "sharded, fitted twice": Fit(replicas=2, options=SHARD, accumulate=2, steps=4, fits=2),
    "sharded, interleaved, with pins": Fit(
        "bf16-mixed", "interleaved_1f1b", Llama, replicas=2, options=SHARD, plan=(PINS,), clip=0.1
    ),
}


@pytest.mark.parametrize("name", [*FITS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fit_in_stages_is_the_fit_on_one_process_bit_for_bit(name: str, ranks: Ranks) -> None:
    fit = {**FITS, **SLOW}[name]
    alone = equal(fit, ranks)
    assert not fit.bad or alone["counts"] == (2, 2)


def test_gradients_are_clipped_by_the_norm_over_all_stages(ranks: Ranks) -> None:
    fit = Fit("16-mixed", scale=64.0, clip=0.1)
    results, alone = ranks.run(fit), fit.alone()
    assert all(same(result["norm"], alone["norm"], OF_A_SUM) for result in results)
    assert same(results[0]["weights"], alone["weights"], OF_A_SUM)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FOUR)
def test_replicas_and_four_stages_are_it_but_for_the_order_of_sums(name: str, four: Ranks) -> None:
    fit = IN_FOUR[name]
    if fit.replicas == 1:
        equal(fit, four)
    else:  # weights are those that another order has moved
        equal(fit, four, OF_A_SUM, eps(fit.precision) if "32" not in fit.precision else OF_A_SUM)


def test_a_rank_holds_the_numbers_of_its_own_stage(ranks: Ranks) -> None:
    results = ranks.run(Fit())
    numbers = {name: parameter.numel() for name, parameter in Staged().named_parameters()}
    for rank, result in enumerate(results):
        held = sum(numbers[name] for name in result["gradients"][0])
        gone = len(numbers) - len(result["gradients"][0])
        assert result["held"] == held + gone, rank  # one number stands for each parameter that is elsewhere


class Dropped(Staged):
    """Draws as many numbers in its second stage as in its first; notes what was dropped on this rank."""

    def build(self) -> None:
        super().build()
        for block in self.blocks[::2]:
            block.up = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 16))
        self.masks: list[Tensor] = []
        for block in self.blocks[::2]:
            block.up[0].register_forward_hook(lambda *args: self.masks.append(args[2] == 0))


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH), torch.randn(1)


def of_one_seed() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What each rank dropped, which batches it was given, and where its generator stands at the end."""
    module, plan = Dropped(), MixedPrecisionPlan("32-true")
    torch.manual_seed(0)
    strategy = make_strategy("pipeline", plan, stages=2, microbatches=4)
    trainer(strategy=strategy, plugins=[plan], devices=2).fit(module, DataLoader(Drawing(), batch_size=ROWS))
    return module.masks[1:], module.seen, torch.rand(1)  # the first is of the call that shows torch the shapes


def test_stages_of_one_seed_drop_others_and_leave_what_data_draws_alone(ranks: Ranks) -> None:
    (first, seen, drawn), (second, also_seen, also_drawn) = ranks.call(of_one_seed)
    assert len(first) == len(second) == 12
    assert not any(torch.equal(one, other) for one in first for other in second)
    assert len({tuple(mask.flatten().tolist()) for mask in (*first, *second)}) == 24  # nor any mask again
    assert all(torch.equal(one, other) for one, other in zip(seen, also_seen, strict=True))
    assert torch.equal(drawn, also_drawn)
