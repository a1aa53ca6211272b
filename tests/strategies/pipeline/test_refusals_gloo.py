"""What cannot run in stages is refused on every rank before the first step, with what was given and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy
from support.pipeline import GPT2, LENGTH, ROWS, VOCABULARY, WIDTH, Llama, Staged, data
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo


class Tied(Llama):
    """Its table is its head."""

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


class Prodigy(torch.optim.Optimizer):
    """As the real one, by its name: its step is of one length over all parameters together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([p.grad.norm() for p in own]).norm()
        for parameter in own:
            parameter.sub_(parameter.grad / length, alpha=1e-2)


class Coupled(Staged):
    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters())


class NoLoss(Staged):
    pipeline_loss = None


class NoStage(Staged):
    pipeline_stage = None


class Logs(Staged):
    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().pipeline_loss(output, target)
        self.log("mine", loss)
        return loss


class NotScalar(Staged):
    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()


class Detached(Staged):
    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().pipeline_loss(output, target).detach()


class Copies(Staged):
    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))


class LeavesOut(Staged):
    def pipeline_stage(self, index: int, count: int) -> nn.Module:
        return nn.Sequential(*self.blocks[index * 2 : index * 2 + 2])


class Sharded(Staged):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self.head, "unshard"):
            fully_shard(self.head)


class Bare(nn.Linear):
    """Says nothing of its initialisation."""

    reset_parameters = None


class Unmade(Staged):
    def build(self) -> None:
        super().build()
        with torch.device("meta"):
            self.head = nn.Linear(WIDTH, 1)
        self.head.__class__ = Bare


class NotAPair(Staged):
    def pipeline_batch(self, batch: Any) -> Any:
        return batch[0]


class Backward(Staged):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Sharpness(torch.optim.SGD):
    """Evaluates a second time where the gradients point, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        held = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, gradient in held:
            parameter.add_(gradient)
        with torch.enable_grad():
            closure()
        for parameter, gradient in held:
            parameter.sub_(gradient)
        super().step()
        return loss


class Sharp(Staged):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), lr=1e-2)


class Penalty(Staged):
    """Of the weights of all stages."""

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().pipeline_loss(output, target) + sum(p.square().sum() for p in self.parameters())


class Compiled(Staged):
    def build(self) -> None:
        super().build()
        self.blocks[0].compile(backend="eager")


class Stream(IterableDataset[Any]):
    """Has no length; its last batch is a small one."""

    def __iter__(self) -> Any:
        return ((torch.ones(WIDTH), torch.ones(1)) for _ in range(ROWS + ROWS // 2))


class Thaw(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


def _varying() -> Any:
    tokens = [torch.randint(VOCABULARY, (ROWS, length)) for length in (LENGTH, LENGTH, LENGTH + 1)]
    return DataLoader([(one, one, one) for one in tokens], batch_size=None)


def _rows(rows: int, number: int) -> Callable[[], Any]:
    return lambda: DataLoader([(torch.randn(WIDTH), torch.randn(1)) for _ in range(number)], batch_size=rows)


def _apart() -> Any:
    members = [(torch.randn(WIDTH), torch.randn(1)) for _ in range(32)]
    return DataLoader(members, batch_size=8, sampler=DistributedSampler(members))


PARTS: dict[str, tuple[type[Staged], str]] = {
    "tied": (Tied, "as tied embeddings are"),
    "manual": (Manual, "manual optimization cannot run in pipeline stages"),
    "closure": (Closure, "LBFGS, which evaluates its closure again, under pipeline parallelism"),
    "coupled": (Coupled, "Prodigy on a stage's parameters alone, whose step of one parameter depends on the others"),
    "no loss": (NoLoss, "NoLoss without pipeline_loss cannot run"),
    "no stages": (NoStage, "NoStage without pipeline_stage(index, count)"),
    "logs": (Logs, "self.log in pipeline_loss"),
    "no scalar": (NotScalar, "pipeline_loss, which returned (2, 1)"),
    "detached": (Detached, "pipeline_loss, which returned a tensor without a gradient"),
    "copies": (Copies, "has a parameter which is not the module's own"),
    "leaves out": (LeavesOut, "'head.weight' is trained, and in none of the 2 stages"),
    "sharded": (Sharded, "sharded or wrapped already"),
    "backward": (Backward, "LightningModule.backward overridden cannot run in pipeline stages"),
    "evaluates again": (Sharp, "Sharpness, which evaluates its closure again, under pipeline parallelism"),
    "others' weights": (Penalty, "a stage that computes with 'blocks.0.norm.weight', which another stage holds"),
    "unmade": (Unmade, "module 'head' on the meta device, which has no reset_parameters()"),
    "not a pair": (NotAPair, "pipeline_batch, which returned Tensor"),
}
LOADERS: dict[str, tuple[type[Staged], Callable[[], Any], str]] = {
    "rows": (Staged, _rows(6, 24), "a batch of 6 rows with microbatches=4"),
    "last": (Staged, _rows(8, 20), "a last batch of 4 rows after batches of 8"),
    "lengths": (GPT2, _varying, "after batches of [(8, 6)]"),
    "a stream's last": (Staged, lambda: DataLoader(Stream(), batch_size=ROWS), "a batch of shape [(4, 8)] after"),
    "apart": (Staged, _apart, "other batches on one stage than on another"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "processes": ({"stages": 3}, "stages=3 and data_parallel_size=1 with 2 processes"),
    "layers": (
        {"schedule": "interleaved_1f1b", "virtual_stages": 3},
        "6 stages of LlamaForCausalLM, which has 4 layers",
    ),
    "1f1b": ({"microbatches": 1}, "microbatches=1 with schedule='1f1b'"),
    "rounds": ({"microbatches": 5, "schedule": "interleaved_1f1b"}, "microbatches=5 with schedule='interleaved_1f1b'"),
}
#: of the Trainer
TRAINERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch norms": (lambda: {"sync_batchnorm": True}, "sync_batchnorm=True cannot run in pipeline stages"),
    "averages": (lambda: {"callbacks": [callbacks.WeightAveraging()]}, "WeightAveraging with sharded weights"),
    "swa": (lambda: {"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging with"),
    "rates": (lambda: {"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder with sharded weights"),
    "thaws": (
        lambda: {"callbacks": [Thaw()]},
        "Thaw with pipeline stages, of whose parameters",
    ),
}
#: after how many batches what is only seen in one is refused
SEEN = {"lengths": 2, "a stream's last": 1}


def _said(
    module: Staged, loader: Any, arguments: dict[str, Any], plan: str = "32-true", **given: Any
) -> tuple[str, int]:
    plan_ = MixedPrecisionPlan(plan)
    strategy = make_strategy("pipeline", plan_, **{"stages": 2, "microbatches": 4, **arguments})
    runner = trainer(strategy=strategy, plugins=[plan_], devices=2, **given)
    torch.manual_seed(0)
    try:
        runner.fit(module, loader)
    except PlanError as error:
        return str(error), runner.global_step
    return "", runner.global_step


@dataclass(frozen=True)
class Refused:
    """Every entry of the tables above."""

    def run(self) -> dict[str, tuple[str, int]]:
        said = {name: _said(cls(), data(1, ROWS), {}) for name, (cls, _) in PARTS.items()}
        said |= {name: _said(cls(), make(), {}) for name, (cls, make, _) in LOADERS.items()}
        said |= {name: _said(Llama(), data(1, ROWS), given) for name, (given, _) in OPTIONS.items()}
        said |= {name: _said(Staged(), data(1, ROWS), {}, **given()) for name, (given, _) in TRAINERS.items()}
        said["fp8"] = _said(Llama(), data(1, ROWS), {}, "fp8-mixed")
        said["compiled"] = _said(Compiled(), data(1, ROWS), {"schedule": "interleaved_zero_bubble"})
        return said


EXPECTED = {
    **{name: text for name, (_, text) in PARTS.items()},
    **{name: text for name, (_, _, text) in LOADERS.items()},
    **{name: text for name, (_, text) in OPTIONS.items()},
    **{name: text for name, (_, text) in TRAINERS.items()},
    "compiled": "compiled modules with schedule='interleaved_zero_bubble'",
    "fp8": "precision='fp8-mixed' under pipeline parallelism",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_refused_on_every_rank_before_a_step(name: str, ranks: Ranks) -> None:
    for said, step in (result[name] for result in ranks.run(Refused())):
        assert EXPECTED[name].lower() in said.lower()
        assert step == SEEN.get(name, 0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
        ({"stages": 1}, "stages=1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"tensor_parallel": 2}, "unknown keyword 'tensor_parallel'"),
    ],
)
def test_arguments_are_refused_at_once(given: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make_strategy("pipeline", MixedPrecisionPlan("32-true"), **given)


@dataclass(frozen=True)
class Drawn:
    """What each rank was given of a loader that shuffles."""

    def run(self) -> Any:
        plan, module = MixedPrecisionPlan("32-true"), Staged()
        torch.manual_seed(int(os.environ["RANK"]))
        members = [(torch.full((WIDTH,), float(number)), torch.ones(1)) for number in range(32)]
        loader = DataLoader(members, batch_size=8, shuffle=True)
        assert isinstance(loader.sampler, RandomSampler)
        trainer(strategy=make_strategy("pipeline", plan, stages=2, microbatches=4), plugins=[plan], devices=2).fit(
            module, loader
        )
        return [batch[:, 0].tolist() for batch in module.seen]


def test_all_stages_are_given_the_same_shuffled_batches(ranks: Ranks) -> None:
    first, second = ranks.run(Drawn())
    assert first == second
    drawn = [number for batch in first for number in batch]
    assert sorted(drawn) == [float(number) for number in range(32)]
    assert drawn != sorted(drawn)
