"""Checkpoints from real runs, with the weights and optimizer states that the ranks held when they were written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp.modules.patterns import plain_name
from support import language, sharded_hosts
from support.models import FEATURES
from support.running import fit
from support.saving import ResumableBatches
from support.sharded import full, on, whole

WIDTH = 33  # two ranks cannot halve it
#: the step whose checkpoint says in which dtype each tensor was, and one that does not
RECORDED, SILENT = 4, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.tied, self.twin = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin.weight = self.tied.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("scratch", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)))
        hidden = hidden + self.twin(self.tied(hidden).relu())
        return self.head(hidden + self.frozen(hidden))


class Held(LightningModule):
    """Holds a model; two parameter groups, and a learning rate that changes every step."""

    def __init__(self, shard: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Net()
        self.shard = shard
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.shard:
            self.shard = False
            _fully_shard(self.model.first, self)
            _fully_shard(self.model, self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.model(batch[0]).float() - batch[1]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        groups = [
            {"params": [p for name, p in trained.items() if "weight" in name], "weight_decay": 0.1},
            {"params": [p for name, p in trained.items() if "weight" not in name], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step == RECORDED:
            tensors = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
            short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
            dtypes = {name: short[tensor.dtype] for name, tensor in tensors.items() if tensor.is_floating_point()}
            checkpoint["lightning_mp"] = {"dtypes": dtypes, "strategy": "test", "world_size": 2}


class HeldLanguage(language.Language):
    def __init__(self, shard: bool = False) -> None:
        super().__init__(language.llama(tie_word_embeddings=True))
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard:
            self.shard = False
            _fully_shard(self.model, self)


def _fully_shard(module: nn.Module, owner: LightningModule) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=owner.device_mesh["data_parallel"])


class Keep(Callback):
    """Saves chosen steps into ``folder``, and keeps what the ranks hold then."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.moments: dict[int, dict[str, dict[str, Tensor]]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        step = trainer.global_step
        if step not in self.steps:
            return
        trainer.save_checkpoint(self.folder / f"{step}.ckpt")
        self.weights[step] = full_state(pl_module)
        if hasattr(trainer.optimizers[0], "optimizer") or not trainer.optimizers[0].state:
            return  # DeepSpeed's
        self.moments[step] = _moments(trainer, pl_module, self.weights[step])


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter under each of its names, and of every buffer that is saved."""
    found = whole(module, twice=True)
    return {name: tensor for name, tensor in found.items() if not name.endswith(("scratch", "inv_freq"))}


def _moments(trainer: Trainer, module: nn.Module, weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    state = trainer.optimizers[0].state
    pieces = {
        plain_name(name): {key: full(value) for key, value in state[parameter].items()}
        for name, parameter in module.named_parameters()
        if parameter in state
    }
    if not torch.distributed.is_initialized():
        return pieces
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, pieces)
    whole: dict[str, dict[str, Tensor]] = {}
    for name in [name for rank in ranks for name in rank]:
        held = [rank[name] for rank in ranks if name in rank]
        if held[0]["exp_avg"].shape == weights[name].shape:
            whole[name] = held[0]
            continue
        parts = ("exp_avg", "exp_avg_sq")
        joined = {key: torch.cat([h[key].flatten() for h in held]).view_as(weights[name]) for key in parts}
        whole[name] = {**joined, "step": held[0]["step"]}
    return whole


#: name -> strategy, module, precision
HOSTS: dict[str, Any] = {
    "fsdp2": (sharded_hosts.fsdp2, lambda: Held(shard=True), "32-true"),
    "fsdp1": (lambda: sharded_hosts.fsdp1(auto_wrap_policy={nn.LayerNorm}), Held, "32-true"),
    **{f"zero{stage}": (lambda s=stage: sharded_hosts.deepspeed(s), Held, "32-true") for stage in range(4)},
    **{f"zero{stage} bf16": (lambda s=stage: sharded_hosts.deepspeed(s), Held, "bf16-true") for stage in (1, 2, 3)},
    "llama fsdp2": (sharded_hosts.fsdp2, lambda: HeldLanguage(shard=True), "32-true"),
    "llama zero3": (lambda: sharded_hosts.deepspeed(3), HeldLanguage, "32-true"),
}


@dataclass(frozen=True)
class Kept:
    """A run under one of ``HOSTS``; what the ranks held when it was saved, and what each reads back."""

    host: str
    folder: Path

    def path(self, step: int = RECORDED) -> Path:
        return self.folder / self.host / f"{step}.ckpt"

    def run(self) -> dict[str, Any]:
        from lightning_mp.checkpoints import read_full

        strategy, module, precision = HOSTS[self.host]
        module, keep = module(), Keep(self.folder / self.host, SILENT, RECORDED)
        data = language.tokens() if self.host.startswith("llama") else ResumableBatches()
        fit(module, data=data, callbacks=[keep], precision=precision, **on(strategy()))
        assert torch.distributed.is_initialized()
        read = read_full(self.path())["state_dict"]
        return {"weights": keep.weights, "moments": keep.moments, "losses": module.losses, "read": read}
