"""A model with batch norms, and what each rank of a run with it does; the tests look at what came back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mp.modules import sync_batchnorm
from lightning_mp.modules.patterns import original_class
from support.models import FEATURES
from support.oracles import plan_for
from support.running import fit
from support.sharded import rank, under, whole, world

STEPS = 4
RATE = 0.05
ZERO = {"zero1": "deepspeed_zero1", "zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}


def conv_net() -> nn.Module:
    wide = nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Unflatten(1, (2, 4, 4))
    return nn.Sequential(*wide, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))


class Normed(LightningModule):
    def __init__(self, make: Callable[[], nn.Module] = conv_net, prepare: Callable[[nn.Module], Any] | None = None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = make()
        if prepare is not None:
            prepare(self.net)
        self.classes: set[str] = set()
        self.hooked = 0
        norm = next((module for module in self.modules() if isinstance(module, nn.BatchNorm1d)), None)
        if norm is not None:
            norm.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.hooked += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.classes |= {original_class(module).__name__ for module in self.modules()}
        x, y = (item[self.trainer.global_rank :: self.trainer.world_size] for item in batch)
        return (self.net(x).float() - y).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


def run(name: str, mode: str, module: LightningModule, **options: Any) -> dict[str, Any]:
    """``single`` is a run of its own on each rank."""
    given = {key: options.pop(key) for key in ("pins", "checkpointing") if key in options}
    plan = plan_for(mode, **given)
    host = {"plugins": [plan]} if name == "single" else under(ZERO.get(name, name), plan)
    fit(module, max_steps=STEPS, **options, **host)
    return {
        "tensors": whole(module),
        "classes": getattr(module, "classes", set()),
        "hooked": getattr(module, "hooked", 0),
    }


def run_on(host: str, mode: str, **options: Any) -> dict[str, Any]:
    return run(host, mode, Normed(), **options)


def direct(device: str) -> list[tuple[Tensor, Tensor]]:
    """A batch norm on each rank's rows, beside one on all of them: outputs, gradients, statistics."""
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("gloo")
    try:
        x = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(3)).to(device)
        whole, part = x.clone().requires_grad_(), x[rank() :: world()].clone().requires_grad_()
        one, each = nn.BatchNorm1d(3).to(device), nn.BatchNorm1d(3).to(device)
        sync_batchnorm.apply([each])
        expected, found = one(whole), each(part)
        (expected**3).sum().backward()
        (found**3).sum().backward()
        assert whole.grad is not None
        assert part.grad is not None
        pairs = [(expected[rank() :: world()], found), (whole.grad[rank() :: world()], part.grad)]
        pairs += zip(one.buffers(), each.buffers(), strict=True)
        return [(a.detach().cpu(), b.detach().cpu()) for a, b in pairs]
    finally:
        if begun:
            dist.destroy_process_group()
