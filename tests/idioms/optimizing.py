"""Optimizers and schedulers as public projects make them."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from idioms.host import STEPS, Host
from idioms.nets import Base, ByHand
from idioms.table import idiom


class Scheduled(Base):
    """Trained by AdamW with a scheduler."""

    def scheduler(self, optimizer: Any) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step", "frequency": 1},
        }


@idiom("karpathy/minGPT; BlinkDL/RWKV-LM, model.py; HazyResearch/safari; Lightning-AI/litgpt")
class DecaysOnlyMatrices(Base):
    def configure_optimizers(self) -> Any:
        decay, rest = set(), set()
        for module_name, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                full = f"{module_name}.{name}" if module_name else name
                (decay if name == "weight" and isinstance(module, nn.Linear) else rest).add(full)
        named = dict(self.named_parameters())
        groups = [
            {"params": [named[name] for name in sorted(decay)], "weight_decay": 0.1},
            {"params": [named[name] for name in sorted(rest)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-3, betas=(0.9, 0.95))


@idiom("IDEA-CCNL/Fengshenbang-LM; facebookresearch/mae; Mask3D; lightly-ai/lightly-train")
class DecaysTheRateByLayer(Base):
    def configure_optimizers(self) -> Any:
        layers = [*self.net.blocks, self.net.head]
        groups = [
            {"params": list(layer.parameters()), "lr": 0.05 * 0.7 ** (len(layers) - place)}
            for place, layer in enumerate(layers)
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@idiom("Unbabel/COMET, regression_metric.py; clovaai/donut; NVIDIA-NeMo/NeMo")
class ScalesAGroupsRate(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(
            [{"params": self.net.blocks.parameters(), "lr": 1e-3}, {"params": self.net.head.parameters()}],
            lr=1e-2,
            eps=1e-3,
        )


@idiom("BlinkDL/RWKV-LM, trainer.py; CompVis/stable-diffusion, lr_scheduler.py: LambdaLinearScheduler")
class WarmsUpByALambda(Scheduled):
    def scheduler(self, optimizer: Any) -> Any:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


@idiom("Lightning-AI/tutorials, MHAttention.py: CosineWarmupScheduler; state-spaces/s4")
class WarmsUpByAClass(Scheduled):
    class CosineWarmup(LRScheduler):
        def get_lr(self) -> list[float]:
            factor = 0.5 * (1 + math.cos(math.pi * self.last_epoch / 10)) * min(1.0, self.last_epoch / 3)
            return [base * factor for base in self.base_lrs]

    def scheduler(self, optimizer: Any) -> Any:
        return self.CosineWarmup(optimizer)


@idiom("openclimatefix; microsoft/torchgeo; Lightning-AI/tutorials; microsoft/ClimaX")
class CosineByStep(Scheduled):
    def scheduler(self, optimizer: Any) -> Any:
        return CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-4)


@idiom("pytorch-tabular; HazyResearch/safari; threestudio-project/threestudio, scheduler.py")
class SequencesTwoSchedulers(Scheduled):
    def scheduler(self, optimizer: Any) -> Any:
        first = LinearLR(optimizer, 0.1, total_iters=2)
        return SequentialLR(optimizer, [first, CosineAnnealingWarmRestarts(optimizer, 2)], milestones=[2])


@idiom("jdb78/pytorch-forecasting; microsoft/torchgeo; torchmd/torchmd-net, module.py")
def plateau_by_epoch(host: Host) -> None:
    class Plateau(Base):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

        def on_train_epoch_start(self) -> None:
            self.note("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    host.fit(Plateau(), max_epochs=4, val_dataloaders=host.data(2, seed=11))


@idiom("asteroid-team/asteroid, system.py; facebookresearch/fastMRI, varnet_module.py; AntixK/PyTorch-VAE")
def steps_by_epoch(host: Host) -> None:
    class Epochs(Base):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-3)
            return [optimizer], [MultiStepLR(optimizer, [1, 2], 0.5)]

    host.fit(Epochs(), max_epochs=3)


@idiom(
    "Lightning-Universe/lightning-bolts, optimizers/lars.py; lightly-ai/lightly; solo-learn, lars.py",
    refused={"zero2": "Lars on ZeRO's pieces of flat tensors"},
)
class OwnOptimizerLars(Base):
    class Lars(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    gradient = parameter.grad
                    if parameter.ndim != 1:
                        ratio = 0.1 * parameter.norm() / (gradient.norm() + 1e-6)
                        gradient = gradient * ratio
                    parameter.add_(gradient, alpha=-group["lr"])
            return loss

    def configure_optimizers(self) -> Any:
        return self.Lars(self.parameters(), lr=0.05)


@idiom(
    "kwea123/nerf_pl, utils/optimizers.py: RAdam, Lookahead; pytorch-optimizer",
    refused={"zero2": "Lookahead with ZeRO, an optimizer that holds another"},
)
class OwnOptimizerLookahead(Base):
    class Lookahead(torch.optim.Optimizer):
        """Wraps an optimizer, and shares its groups."""

        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, base.defaults)
            self.base = base
            self.param_groups = base.param_groups
            self.state = base.state
            self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]
            self.count = 0

        def step(self, closure: Any = None) -> Any:
            loss = self.base.step(closure)
            self.count += 1
            if self.count % 2 == 0:
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for p, q in zip(group["params"], slow, strict=True):
                        q.data.add_(p.data - q.data, alpha=0.5)
                        p.data.copy_(q.data)
            return loss

    def configure_optimizers(self) -> Any:
        return self.Lookahead(super().configure_optimizers())


@idiom("openvpi/DiffSinger, chained_optimizer.py; KellerJordan/Muon; NVIDIA/bionemo")
class OwnOptimizerOfTwo(Base):
    class Chained(torch.optim.Optimizer):
        def __init__(self, matrices: Any, vectors: Any) -> None:
            self.optimizers = [torch.optim.SGD(matrices, lr=0.05), torch.optim.Adam(vectors, lr=0.01, eps=1e-3)]
            super().__init__([*matrices, *vectors], {"lr": 0.05})
            self.param_groups = [group for each in self.optimizers for group in each.param_groups]

        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for each in self.optimizers:
                each.step()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            for each in self.optimizers:
                each.zero_grad(set_to_none)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return self.Chained([p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2])


@idiom(
    "davda54/sam; lightning docs: SAM by hand; microsoft/torchgeo experiments",
    refused={"zero2": "reads parameter.grad, which is None here"},
)
class SharpnessAwareByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        with torch.no_grad():
            moves = [0.02 * torch.sign(p.grad) for p in self.parameters()]
            for parameter, move in zip(self.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, move in zip(self.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@idiom(
    "facebookresearch/fastMRI, optimizer; facebookresearch/ReAgent; Lightning's docs",
    refused=dict.fromkeys(("fsdp2", "zero2"), "LBFGS, which evaluates its closure again"),
    left_out={"16-mixed": "refused by stock too"},
)
class SecondOrderLbfgs(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


@idiom("lucidrains; pytorch-optimizer; NVIDIA-NeMo/NeMo, novograd.py")
class OwnOptimizerSign(Base):
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.01) -> None:
            super().__init__(params, {"lr": lr, "momentum": 0.9})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["step"] = 0
                        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["step"] += 1
                    state["exp_avg"].mul_(group["momentum"]).add_(p.grad)
                    p.add_(torch.tanh(state["exp_avg"]), alpha=-group["lr"])
            return loss

    def configure_optimizers(self) -> Any:
        return self.Sign(self.parameters())


@idiom("torchvision examples; speediedan/finetuning-scheduler; microsoft/hi-ml")
class MakesFusedOptimizers(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3, fused=True)


@idiom("NVIDIA/bionemo-framework; facebookresearch/multimodal; uni2ts")
class MakesForeachOptimizers(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.02, eps=1e-3, foreach=True)


@idiom("ashleve/lightning-hydra-template, mnist_module.py; grok-ai/nn-template; txie-93/cdvae")
def partial_optimizers_of_hydra(host: Host) -> None:
    class Partial(Base):
        optimizer, scheduler = partial(torch.optim.Adam, lr=0.02, eps=1e-3), partial(CosineAnnealingLR, T_max=3)

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer(params=self.trainer.model.parameters())
            scheduler = {"scheduler": self.scheduler(optimizer=optimizer), "interval": "step", "monitor": "val_loss"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    host.fit(Partial())


@idiom(
    "Lightning's docs; taming-transformers; skillful_nowcasting; two frequencies by hand",
    refused={"zero2": "DeepSpeed currently only supports single optimizer"},
)
class StepsTwoOptimizersByTurns(ByHand):
    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net.blocks.parameters(), lr=0.05)
        return [first, torch.optim.SGD(self.net.head.parameters(), lr=0.02)], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()[batch_idx % 2]
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@idiom(
    "facebookresearch/d2go; fairseq; detectron: gradients are clipped in the optimizer's step",
    refused={"zero2": "whose step clips by the norm of this rank's pieces"},
)
class ClipsInTheOptimizersStep(Base):
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            parameters = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, 0.5)
            super().step()
            return loss

    def configure_optimizers(self) -> Any:
        return self.Clipped(self.parameters(), lr=0.05)


@idiom(
    "Lightning's flags: 40 of 105 projects set accumulate_grad_batches and gradient_clip_val",
    rounded={"bf16-true": "the norm is computed in fp32"},
)
def accumulates_and_clips(host: Host) -> None:
    host.fit(Base(), accumulate_grad_batches=2, gradient_clip_val=0.5)


@idiom(
    "Lightning's flag gradient_clip_algorithm='value'; asteroid; fairchem",
    refused={"zero2": "gradient_clip_algorithm='value' with ZeRO"},
)
def clips_by_value(host: Host) -> None:
    host.fit(Base(), gradient_clip_val=0.05, gradient_clip_algorithm="value")


@idiom(
    "facebookresearch/ReAgent; scverse: an optimizer is made anew in the run",
    refused={"zero2": "trainer.optimizers replaced or wrapped"},
)
class ReplacesTrainerOptimizers(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.02)]


@idiom(
    "speediedan/finetuning-scheduler; pyannote, callback.py: a group is added in the run",
    refused={"zero2": "optimizer.add_param_group() in a run with ZeRO"},
)
class AddsAGroupInTheRun(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.05)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks.parameters()), "lr": 0.01})
