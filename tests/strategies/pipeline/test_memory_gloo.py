"""The memory that the planner predicts of the first stage is what the allocator gave out in two processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import predict_memory
from lightning_mp.planner.memory import PARTS
from support.ranks import Ranks
from support.running import trainer

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LENGTH, VOCABULARY, STAGES = 64, 512, 2
#: of the allocator's peak
WITHIN = 0.1


class Llama(LightningModule):
    """Large enough for what Lightning and torch keep besides not to count; it has no ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)).train()

    def pipeline_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return batch, batch

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Peak:
    """Three steps of ``microbatches`` of ``rows``."""

    precision: str
    schedule: str = "1f1b"
    microbatches: int = 4
    rows: int = 2

    def arguments(self) -> tuple[MixedPrecisionPlan, Any]:
        plan = MixedPrecisionPlan(self.precision)
        return plan, make_strategy(
            "pipeline", plan, stages=STAGES, schedule=self.schedule, microbatches=self.microbatches
        )

    def batch(self, number: int = 1) -> Tensor:
        return torch.randint(VOCABULARY, (number * self.microbatches * self.rows, LENGTH))

    def run(self) -> int:
        plan, strategy = self.arguments()
        runner = trainer(strategy=strategy, plugins=[plan], devices=STAGES)
        with PeakMemory() as peak:
            runner.fit(Llama(), DataLoader(self.batch(3), self.microbatches * self.rows))
        return peak.bytes

    def predicted(self, module: nn.Module) -> Any:
        plan, strategy = self.arguments()
        return predict_memory(module, self.batch(), plan, strategy=strategy, devices=STAGES)


PEAKS = (Peak("bf16-mixed"), Peak("32-true", "gpipe", 8))


@pytest.mark.parametrize("peak", PEAKS, ids=repr)
def test_the_first_stages_peak_is_the_allocators(peak: Peak, ranks: Ranks) -> None:
    module = Llama()
    found = peak.predicted(module)
    assert found.method == "traced"
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == found.peak_bytes
    assert "training_step" not in vars(module)
    assert found.peak_bytes == pytest.approx(ranks.run(peak)[0], rel=WITHIN)


def test_sharded_and_interleaved_stages_are_by_formula() -> None:
    plan = MixedPrecisionPlan("32-true")
    strategy = make_strategy("pipeline", plan, stages=2, schedule="interleaved_1f1b", microbatches=4)
    found = predict_memory(Llama(), Peak("32-true").batch(), plan, strategy=strategy, devices=2)
    whole = predict_memory(Llama(), Peak("32-true").batch(), plan)
    assert found.method == "formula"
    assert found.parts["parameters"] == whole.parts["parameters"] // 2
