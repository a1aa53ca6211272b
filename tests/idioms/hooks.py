"""LightningModule hooks that public projects override."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from idioms.host import Host
from idioms.nets import Base
from idioms.table import idiom


@idiom("torchmd/torchmd-net, torchmdnet/module.py; microsoft/ClimaX; NVIDIA/bionemo-framework")
class WarmsUpInOptimizerStep(Base):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"] if "optimizer" in kwargs else args[2]
        if self.trainer.global_step < 4:
            scale = min(1.0, (self.trainer.global_step + 1) / 4)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.05
        super().optimizer_step(*args, **kwargs)
        optimizer.zero_grad()


@idiom("kuleshov-group/mdlm, diffusion.py")
class UpdatesAnAverageInOptimizerStep(Base):
    def on_train_start(self) -> None:
        self.shadow = [p.clone().detach() for p in self.parameters()]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for shadow, parameter in zip(self.shadow, self.parameters(), strict=True):
                shadow.sub_(0.1 * (shadow - parameter))

    def on_train_end(self) -> None:
        shadow = self.shadow[1]
        shadow = shadow.full_tensor() if hasattr(shadow, "full_tensor") else shadow
        self.note("shadow", shadow.float().norm())


@idiom("Lightning-AI/tutorials, MHAttention.py")
class StepsItsSchedulerInOptimizerStep(Base):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()


@idiom(
    "NVIDIA/bionemo-framework, encodon_pl.py; facebookresearch/fairchem; YuliangXiu/ICON",
    refused={"zero2": "reads parameter.grad, which is None here"},
)
class SkipsBadGradientsInAHook(Base):
    def on_after_backward(self) -> None:
        bad = any(p.grad is not None and not torch.isfinite(p.grad).all() for p in self.parameters())
        if bad:
            self.zero_grad()


@idiom(
    "NVIDIA/bionemo-framework, encodon_pl.py; lightly-ai/lightly, dino.py",
    rounded={"bf16-true": "the norm is computed in fp32"},
)
class ClipsInConfigureGradientClipping(Base):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


@idiom(
    "NVIDIA-NeMo/NeMo, megatron_base_model.py",
    refused={"zero2": "Gradients clipped by hand before the step, with ZeRO"},
)
class ClipsWithTorchInConfigureGradientClipping(Base):
    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **options: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.log("grad_norm", float(norm))


@idiom(
    "lightly-ai/lightly, benchmarks/imagenet/vitb16/dino.py; vturrisi/solo-learn, solo/methods/dino.py",
    refused={"zero2": "parameter.grad set before the step, with ZeRO"},
)
class FreezesTheHeadsGradientsAtFirst(Base):
    """DINO cancels the last layer's gradients in the first epoch."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step < 3:
            for parameter in self.net.head.parameters():
                parameter.grad = None


@idiom(
    "lightly-ai/lightly, benchmarks/imagenet/vitb16/dino.py",
    refused={"zero2": "reads parameter.grad, which is None here"},
)
class FreezesTheHeadBeforeTheStep(Base):
    def on_before_optimizer_step(self, optimizer: Any, *rest: Any) -> None:
        if self.trainer.global_step < 3:
            for parameter in self.net.head.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()


@idiom("asteroid-team/asteroid, asteroid/engine/system.py; ecmwf/anemoi-core, training/train/methods/base.py")
class StepsATimmSchedulerByUpdates(Base):
    """A scheduler with ``step_update``, as timm's, which Lightning's own call does not know."""

    class Warmup(torch.optim.lr_scheduler.LambdaLR):
        def step_update(self, num_updates: int) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, (num_updates + 1) / 4)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = self.Warmup(optimizer, lambda step: 1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)


@idiom("vturrisi/solo-learn, solo/methods/base.py; baudm/parseq, strhub/models/base.py")
class ZeroesGradientsToNone(Base):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


@idiom("Stability-AI/stable-audio-tools, training/diffusion.py; aqlaboratory/openfold, train_openfold.py")
class AveragesBeforeZeroGrad(Base):
    def __init__(self) -> None:
        super().__init__()
        self.average = deepcopy(self.net).requires_grad_(False).eval()

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for average, current in zip(self.average.parameters(), self.net.parameters(), strict=True):
                average.lerp_(current, 0.1)


@idiom("NVIDIA-NeMo/NeMo, nemo/collections/asr/models/ssl_models.py; microsoft/torchgeo")
class MovesItsOwnBatch(Base):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return tuple(tensor.to(device) for tensor in batch)


@idiom("Lightning-AI/tutorials, augmentation_kornia/augmentation.py; microsoft/torchgeo; lightning-flash")
class AugmentsAfterTheTransfer(Base):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x * 0.5, y) if self.trainer.training else (x, y)


@idiom(
    "scverse/scvi-tools, dataloaders/_custom_dataloaders.py",
    left_out={"bf16-true": "the cast is undone after Lightning's: stock ends in a dtype error too"},
)
class CastsBeforeTheTransfer(Base):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0].float(), "y": batch[1].float()}

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]))


@idiom(
    "scverse/scvi-tools, external/decipher/_trainingplan.py; facebookresearch/pytorchvideo",
    refused={"zero2": "LightningModule.backward overridden with ZeRO"},
)
class CallsBackwardItself(Base):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=False)


@idiom("Lightning-AI/tutorials; microsoft/hi-ml; state-spaces/s4")
class BuildsInSetup(Base):
    def setup(self, stage: str) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.net(x))


@idiom("NVIDIA-NeMo/NeMo, avlm/model/base.py; NVIDIA/bionemo-framework, inference/base.py")
class BuildsInConfigureModel(Base):
    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            torch.manual_seed(3)
            self.late = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.net(x))


@idiom("solo-learn, methods/byol.py; lightly-ai/lightly; CompVis/stable-diffusion, ddpm.py")
class AveragesAtBatchEnd(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return super().loss(batch) + (self(batch[0]) - target).float().pow(2).mean()

    @torch.no_grad()
    def on_train_batch_end(self, *rest: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)


@idiom("facebookresearch/fastMRI; ashleve/lightning-hydra-template, mnist_module.py")
def validates_each_epoch(host: Host) -> None:
    host.fit(Base(), max_epochs=2, val_dataloaders=host.data(2, seed=11))
