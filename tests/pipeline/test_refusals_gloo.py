"""What cannot run in stages is refused on every rank before the first step, with what was given and what to do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy
from support.pipeline import GPT2, LENGTH, ROWS, VOCABULARY, WIDTH, Llama, Staged, data
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo


class Tied(Llama):
    def build(self) -> None:
        super().build()
        self.model.lm_head.weight = self.model.model.embed_tokens.weight


class Manual(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Closure(Staged):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoLoss(Staged):
    pipeline_loss = None


class NoStage(Staged):
    pipeline_stage = None


class Copies(Staged):
    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))


class LeavesOut(Staged):
    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        return nn.Sequential(*self.blocks[index * 2 : index * 2 + 2])


class NotAPair(Staged):
    def pipeline_batch(self, batch: Any) -> Any:
        return batch[0]


def _varying() -> Any:
    tokens = [torch.randint(VOCABULARY, (ROWS, length)) for length in (LENGTH, LENGTH, LENGTH + 1)]
    return DataLoader([(one, one, one) for one in tokens], batch_size=None)


def _rows(rows: int, number: int) -> Callable[[], Any]:
    return lambda: DataLoader([(torch.randn(WIDTH), torch.randn(1)) for _ in range(number)], batch_size=rows)


def _apart() -> Any:
    members = [(torch.randn(WIDTH), torch.randn(1)) for _ in range(32)]
    return DataLoader(members, batch_size=8, sampler=DistributedSampler(members))


def _one() -> Any:
    return data(1, ROWS)


@dataclass(frozen=True)
class Refused:
    says: str
    module: type[Staged] = Staged
    data: Callable[[], Any] = _one
    #: of the strategy, and of the Trainer
    options: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[], dict[str, Any]] = dict

    def said(self) -> tuple[str, int]:
        plan = MixedPrecisionPlan("32-true")
        strategy = make_strategy("pipeline", plan, **{"stages": 2, "microbatches": 4, **self.options})
        runner = trainer(strategy=strategy, plugins=[plan], devices=2, **self.arguments())
        torch.manual_seed(0)
        with pytest.raises(PlanError) as raised:
            runner.fit(self.module(), self.data())
        return str(raised.value), runner.global_step


SIX = {"schedule": "interleaved_1f1b", "virtual_stages": 3}
CASES = {
    "tied": Refused("as tied embeddings are", Tied),
    "manual": Refused("manual optimization cannot run in pipeline stages", Manual),
    "closure": Refused("LBFGS, which evaluates its closure again, under pipeline parallelism", Closure),
    "no loss": Refused("NoLoss without pipeline_loss cannot run", NoLoss),
    "no stages": Refused("NoStage without pipeline_stage(index, count)", NoStage),
    "copies": Refused("has a parameter which is not the module's own", Copies),
    "leaves out": Refused("'head.weight' is trained, and in none of the 2 stages", LeavesOut),
    "not a pair": Refused("pipeline_batch, which returned Tensor", NotAPair),
    "rows": Refused("a batch of 6 rows with microbatches=4", data=_rows(6, 24)),
    "last": Refused("a last batch of 4 rows after batches of 8", data=_rows(8, 20)),
    "lengths": Refused("after batches of [(8, 6)]", GPT2, _varying),
    "apart": Refused("other batches on one stage than on another", data=_apart),
    "processes": Refused("stages=3 and data_parallel_size=1 with 2 processes", Llama, options={"stages": 3}),
    "layers": Refused("6 stages of LlamaForCausalLM, which has 4 layers", Llama, options=SIX),
    "batch norms": Refused("sync_batchnorm=True cannot run in", arguments=lambda: {"sync_batchnorm": True}),
    "averages": Refused(
        "WeightAveraging with pipeline stages", arguments=lambda: {"callbacks": [callbacks.WeightAveraging()]}
    ),
}


def every() -> dict[str, tuple[str, int]]:
    return {name: case.said() for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_on_every_rank_before_a_step(name: str, ranks: Ranks) -> None:
    for said, step in (result[name] for result in ranks.call(every)):
        assert CASES[name].says.lower() in said.lower()
        assert step == (2 if name == "lengths" else 0)


def test_arguments_are_refused_at_once() -> None:
    for given, text in (
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
        ({"stages": 1}, "stages=1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"tensor_parallel": 2}, "unknown keyword 'tensor_parallel'"),
    ):
        with pytest.raises(PlanError, match=text):
            make_strategy("pipeline", MixedPrecisionPlan("32-true"), **given)
