"""What public projects assign while they train: weights, gradients, buffers, modules, flags."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idioms.nets import Base, Net
from idioms.table import idiom

#: DDP sends the first rank's buffers to all before each forward pass; the others leave each rank its own, as stock does
BUFFERS = dict.fromkeys(("fsdp2", "zero2"), "each rank keeps the buffers that it computed")


class Taught(Base):
    """A student and a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).float()
        return super().loss(batch) + (self(batch[0]).float() - target).pow(2).mean()

    def pairs(self) -> Any:
        return zip(self.teacher.parameters(), self.net.parameters(), strict=True)


@idiom("vturrisi/solo-learn, utils/momentum.py; microsoft/torchgeo, byol.py; facebookresearch/multimodal, common.py")
class AssignsTheTeachersData(Taught):
    def on_train_batch_end(self, *rest: Any) -> None:
        for slow, fast in self.pairs():
            slow.data = slow.data * 0.9 + fast.data * 0.1


@idiom("lightly-ai/lightly, models/utils.py; Zasder3/train-CLIP, wrapper.py; pytorchvideo, byol.py")
class CopiesIntoTheTeachersData(Taught):
    def on_train_batch_end(self, *rest: Any) -> None:
        for slow, fast in self.pairs():
            slow.data.copy_(0.9 * slow.data + 0.1 * fast.data)


@idiom(
    "lightly-ai/lightly, examples/pytorch_lightning/moco.py; facebookresearch/moco",
    refused=dict.fromkeys(("fsdp2 bf16-mixed", "fsdp2 16-mixed"), "something reads or writes its values there"),
)
class UpdatesTheTeacherInTrainingStep(Taught):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for slow, fast in self.pairs():
                slow.data = slow.data * 0.9 + fast.data * (1.0 - 0.9)
        return self.loss(batch)


@idiom("lightly-ai/lightly, ijepa.py; facebookresearch/ijepa")
class UpdatesTheTeacherByMulAndAdd(Taught):
    def on_train_batch_end(self, *rest: Any) -> None:
        with torch.no_grad():
            for slow, fast in self.pairs():
                slow.data.mul_(0.9).add_(0.1 * fast.detach().data)


@idiom(
    "facebookresearch/ReAgent; lightning-bolts, dqn_model.py",
    refused={"fsdp2": "used in the step outside of the unit that holds it"},
)
class LoadsTheTeachersStateDict(Taught):
    """A target network of reinforcement learning, copied every few steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step % 3 == 0:
            self.teacher.load_state_dict(self.net.state_dict())
        return self.loss(batch)


@idiom("fishaudio/fish-diffusion, diffsinger.py; facebookresearch/d2go, ema.py")
class AveragesStateDicts(Taught):
    def on_train_batch_end(self, *rest: Any) -> None:
        with torch.no_grad():
            slow, fast = self.teacher.state_dict(), self.net.state_dict()
            for name, value in slow.items():
                value.copy_(value * 0.9 + fast[name] * 0.1)


@idiom("eriklindernoren/PyTorch-GAN, wgan.py; openclimatefix; facebookresearch/fastMRI, adversary")
class ClampsWeightData(Base):
    def on_train_batch_end(self, *rest: Any) -> None:
        for parameter in self.net.head.parameters():
            parameter.data.clamp_(-0.2, 0.2)


@idiom(
    "advimman/lama, lpips.py; HazyResearch/safari; lightning-bolts",
)
class AssignsClampedWeightData(Base):
    def on_train_batch_end(self, *rest: Any) -> None:
        for module in self.net.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = torch.clamp(module.weight.data, -0.3, 0.3)


@idiom("lightning-bolts, swav_module.py; vturrisi/solo-learn, swav.py; facebookresearch/swav")
class NormalizesPrototypes(Base):
    def on_train_batch_start(self, *rest: Any) -> None:
        with torch.no_grad():
            weight = self.net.head.weight.data.clone()
            self.net.head.weight.copy_(functional.normalize(weight, dim=1, p=2))


@idiom(
    "NVIDIA/bionemo-framework, sparse_autoencoders; neelnanda sparse autoencoders",
)
class ProjectsToUnitNorm(Base):
    @torch.no_grad()
    def on_train_batch_end(self, *rest: Any) -> None:
        weight = self.net.blocks[0].linear.weight
        weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)


@idiom(
    "microsoft/ClimaX; atomistic-machine-learning/schnetpack, callbacks; speediedan/finetuning-scheduler",
    differs=dict.fromkeys(("ddp", "fsdp2"), "stock DDP does not sum gradients of what is unfrozen in a run"),
    refused={"zero2": "frozen or unfrozen in a run with ZeRO"},
)
class UnfreezesInTrainEpochStart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for parameter in self.net.blocks.parameters():
                parameter.requires_grad = True


@idiom("CompVis/stable-diffusion; wayveai/fiery; lllyasviel/ControlNet, cldm.py")
class FreezesAPartInInit(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].eval()
        for parameter in self.net.blocks[0].parameters():
            parameter.requires_grad = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01, eps=1e-4)


@idiom("CompVis/stable-diffusion, ddpm.py: disabled_train; Stability-AI/generative-models; DynamiCrafter")
class ReplacesTrainOfAFrozenPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first_stage = Net(outputs=8).eval()
        self.first_stage.train = lambda mode=True: self.first_stage
        for parameter in self.first_stage.parameters():
            parameter.requires_grad = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            latent = self.first_stage(x)
        return super().loss((latent, y))


@idiom("CompVis/stable-diffusion, ddpm.py: scale_by_std in on_train_batch_start; VideoCrafter", same_rows=True)
class RegistersABufferInTraining(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale_factor", torch.tensor(1.0))

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 0 and batch_idx == 0:
            del self.scale_factor
            self.register_buffer("scale_factor", 1.0 / batch[0].flatten().std())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale_factor)


@idiom("lightly-ai/lightly, memory_bank.py; vturrisi/solo-learn, mocov2.py; facebookresearch/moco", same_rows=True)
class KeepsAQueueInABuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        features = functional.normalize(self.net.features(batch[0]), dim=1)
        logits = features @ self.queue.clone().detach().to(features.dtype)
        self.enqueue(features.detach())
        return super().loss(batch) + 0.1 * logits.float().logsumexp(1).mean()

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + len(keys)] = keys.t().to(self.queue.dtype)
        self.queue_ptr[0] = (pointer + len(keys)) % 16


@idiom(
    "facebookresearch/dino, main_dino.py; lightly-ai/lightly, loss/dino_loss.py; vturrisi/solo-learn, dino",
    differs=BUFFERS,
    left_out={"zero2 bf16-true": "the difference is within the rounding of half weights"},
)
class KeepsACenterInABuffer(Taught):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 1))

    def loss(self, batch: Any) -> Tensor:
        target = self.teacher(batch[0])
        self.center = self.center * 0.9 + target.mean(0, keepdim=True).to(self.center.dtype) * 0.1
        return (self(batch[0]).float() - (target - self.center).float()).pow(2).mean() + super().loss(batch)


@idiom("CompVis/taming-transformers, quantize.py: EmbeddingEMA; vector-quantize-pytorch; SEED-Voken", same_rows=True)
class UpdatesACodebookByAverages(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("sizes", torch.ones(4))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        z = self.net.features(x)
        nearest = torch.cdist(z.float(), self.codes.float()).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = functional.one_hot(nearest, 4).to(self.codes.dtype)
                self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.data.mul_(0.9).add_((hot.t() @ z.to(hot.dtype)), alpha=0.1)
        quantized = z + (self.codes[nearest].to(z.dtype) - z).detach()
        return functional.mse_loss(self.net.head(quantized).float(), y.float())


@idiom("scverse/scvi-tools, nn/_base_components.py; YosefLab/scvi-tools")
class HooksAWeightsGradient(Base):
    """scvi-tools masks the gradient of some of a layer's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight.register_hook(self.mask)

    def mask(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, :2] = 0
        return gradient


@idiom(
    "NVIDIA-NeMo/NeMo, adapters; kwea123/nerf_pl", refused={"zero2": "parameter.grad set before the step, with ZeRO"}
)
class SetsGradOfSomeToNone(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.grad = None


@idiom("jwohlwend/boltz; facebookresearch/fairchem, nan handling", refused={"zero2": "reads parameter.grad"})
class ReplacesNanGradients(Base):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                torch.nan_to_num(parameter.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=parameter.grad)


@idiom("chemprop/chemprop, models; microsoft/torchgeo; Lightning-AI/tutorials")
class AssignsParametersInInitWeights(Base):
    def on_fit_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(0.5)
                if module.bias is not None:
                    module.bias.data.zero_()


@idiom("lightning-flash, model.py; Unbabel/COMET, base.py; NVIDIA-NeMo/NeMo")
class ReplacesTheHeadInSetup(Base):
    def setup(self, stage: str) -> None:
        torch.manual_seed(5)
        self.net.head = nn.Linear(8, 1)


@idiom("Lightning-AI/litgpt; IDEA-CCNL/Fengshenbang-LM; karpathy/minGPT", wrap=None)
class TiesTwoWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, 8, bias=False)
        self.decoder.weight = self.net.blocks[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.decoder(x))
