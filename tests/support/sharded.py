"""What each rank of a run under DDP, FSDP1, FSDP2 or ZeRO does; the tests look at what came back."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_mp import PlanError
from lightning_mp.modules.patterns import plain_name
from support import hf
from support.models import FEATURES, InfiniteGradient, Regression
from support.oracles import plan_for
from support.running import fit

WAIT = {"timeout": timedelta(seconds=60), "process_group_backend": "gloo"}
BAD_RANK = 1
PINS = {"LayerNorm": "fp32"}
RATE = 1e-2


def _by_dimension(parameters: Any) -> Any:
    """Groups as most training scripts make them: no decay for what has one dimension, and that group first."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3}]
    return AdamW([*groups, {"params": [p for p in parameters if p.dim() > 1]}], lr=RATE, eps=1e-4, weight_decay=0.3)


OPTIMIZERS: dict[str, Any] = {
    "fused": partial(AdamW, lr=RATE, eps=1e-4, fused=True), "adamw": partial(AdamW, lr=RATE, eps=1e-4),
    "momentum": partial(SGD, lr=1e-3, momentum=0.9), "sgd": partial(SGD, lr=1e-3), "groups": _by_dimension,
}  # fmt: skip


def rank() -> int:
    """This process's."""
    return int(os.environ["RANK"])


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"])


def on(strategy: Any) -> dict[str, Any]:
    """Trainer arguments: every rank on the CPU, with its own data."""
    return {"strategy": strategy, "devices": world(), "use_distributed_sampler": False}


def under(name: str, plan: Any, **options: Any) -> dict[str, Any]:
    """Trainer arguments: a plan under the strategy that is made for it."""
    from lightning_mp import make_strategy

    return {"plugins": [plan], **on(make_strategy(name, plan, **{"timeout": WAIT["timeout"], **options}))}


def ddp(**options: Any) -> dict[str, Any]:
    """Under DDP, and no waiting for ever."""
    return on(DDPStrategy(**WAIT, **options))


def _ours(name: str, **options: Any) -> dict[str, Any]:
    from lightning_mp.strategies import registry

    return on(registry.build(name, None, options))


#: under FSDP; every linear layer is a unit unless told otherwise
fsdp1, fsdp2 = (partial(_ours, name, wrap="Linear", **WAIT) for name in ("fsdp1", "fsdp2"))
STAGES = ("1", "2", "3", "2_offload", "3_offload")
HOSTS: dict[str, Callable[..., dict[str, Any]]] = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}
HOSTS |= {f"zero{stage}": partial(_ours, f"deepspeed_zero{stage}", timeout=WAIT["timeout"]) for stage in STAGES}


class Ranked(Regression):
    """Each data-parallel rank has its own data; gradients overflow on rank ``BAD_RANK`` alone, in the batches ``bad``.

    ``even`` nets are split into whole vectors of the CPU's. Torch rounds what is left over from a vector another way,
    so that a step on a piece of a tensor is, to the last bit, the step on the whole only where nothing is left over.
    """

    def __init__(
        self, bad: tuple[int, ...] = (), optimizer: str = "fused", schedule: bool = False, even: bool = False
    ) -> None:
        super().__init__(OPTIMIZERS[optimizer], partial(StepLR, step_size=1, gamma=0.5) if schedule else None)
        self.bad = bad
        self.validated: list[float] = []
        #: by batch, how many came before it: the same when a batch is run again
        self._places: dict[int, int] = {}
        self._place = 0
        if even:
            generator = torch.Generator().manual_seed(5)
            layers = nn.Linear(FEATURES, 64, bias=False), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 2, bias=False)
            self.net = nn.Sequential(*layers)
            for parameter in self.net.parameters():
                parameter.data.normal_(0.0, 0.1, generator=generator)

    def factor(self) -> int:
        """What this rank's data is multiplied with."""
        return 1 + self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._place = self._places.setdefault(batch_idx, len(self.losses))
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net(x * self.factor())
        guilty = self.global_rank == min(BAD_RANK, self.trainer.world_size - 1)
        if self.training and guilty and self._place in self.bad:
            out = InfiniteGradient.apply(out)
        return (out.float() - y.float()).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Language(LightningModule):
    """A tiny transformers model; each rank has its own rows."""

    models, vocabulary, optimizer = hf.MODELS, hf.VOCABULARY, "groups"

    def __init__(self, kind: str, meta: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device("meta") if meta else nullcontext():
            self.model = self.models[kind]()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, (batch + self.global_rank) % self.vocabulary)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Readings(Callback):
    """The plan's readings after each batch; a norm that nobody took is nan."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *rest: Any) -> None:
        plan: Any = trainer.precision_plugin
        self.skipped.append(plan.step_skipped)
        if plan.scaler is not None:
            self.scales.append(plan.scaler.get_scale())
        self.norms.append(float("nan") if plan.last_grad_norm is None else float(plan.last_grad_norm))


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor; every rank calls it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the module's parameters are whole, whatever sharded it; FSDP2's stay DTensors."""
    trainer, context = getattr(module, "_trainer", None), nullcontext()
    model = trainer and trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    elif any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        import deepspeed

        context = deepspeed.zero.GatheredParameters(list(module.parameters()))
    with context:
        yield


def whole(module: nn.Module, twice: bool = False) -> dict[str, Tensor]:
    """Every parameter and buffer in full, under its own name, or ``twice`` under each, whatever sharded it."""
    with gathered(module):
        named = (*module.named_parameters(remove_duplicate=not twice), *module.named_buffers())
        return {plain_name(name): full(tensor) for name, tensor in named}


def initialised_as_usual(start: Mapping[str, Tensor], usual: Mapping[str, Tensor]) -> bool:
    """Whether norms and tables of positions are equal, and what is drawn at random spreads alike."""
    fixed = {name for name in usual if "norm" in name or "inv_freq" in name}
    return start.keys() == usual.keys() and all(
        torch.equal(start[name], one) if name in fixed else abs(start[name].std() / one.std() - 1) < 0.25
        for name, one in usual.items()
    )


#: what of the options of :func:`trained` is the plan's
PLANS = ("pins", "reduce_dtype", "checkpointing", "loss_scaling", "nonfinite")


def trained(mode: str, host: dict[str, Any], module: LightningModule, **options: Any) -> dict[str, Any]:
    """One run, and what is left of it."""
    plan = plan_for(mode, **{key: options.pop(key) for key in PLANS if key in options})
    readings = Readings()
    fit(module, plugins=[plan], callbacks=[readings, *options.pop("callbacks", ())], **options, **host)
    return {
        "weights": whole(module),
        **{name: getattr(readings, name) for name in ("skipped", "scales", "norms")},
        "counts": (plan.applied_steps, plan.skipped_steps),
        **{name: list(getattr(module, name, ())) for name in ("losses", "validated", "lrs")},
    }


@dataclass(frozen=True)
class Both:
    """The same run under DDP and under a sharded strategy."""

    mode: str
    module: Callable[[], LightningModule] = Ranked
    #: the plan's and the Trainer's
    options: dict[str, Any] = field(default_factory=dict)
    #: the strategy's
    strategy: dict[str, Any] = field(default_factory=dict)
    host: str = "fsdp2"

    def run(self) -> dict[str, Any]:
        unused = {"find_unused_parameters": True} if self.host == "fsdp2" else {}
        return {
            "ddp": trained(self.mode, ddp(**unused), self.module(), **self.options),
            "sharded": trained(self.mode, HOSTS[self.host](**self.strategy), self.module(), **self.options),
        }


def refused_way(table: str, which: str) -> str:
    """What is said instead of running; ``which`` is one of the ``WAYS`` of ``table``, a module."""
    said = refused(import_module(table).WAYS[which])
    dist.barrier()
    return said


def refused(call: Callable[[], Any]) -> str:
    """What was said instead of running."""
    try:
        call()
    except PlanError as error:
        return str(error)
    return "not refused"
