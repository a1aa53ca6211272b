"""What public projects read while they train: dtypes, devices, the Trainer, optimizers, gradients, metrics."""

import math
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn import functional

from idioms.host import ROWS, STEPS, Host
from idioms.nets import Base, ByHand
from idioms.table import idiom

#: ZeRO has moved the gradients, and says so once
MOVED = {"zero2": "reads parameter.grad, which is None here"}


@idiom("kuleshov-group/mdlm, diffusion.py; CompVis/stable-diffusion, ddpm.py; Stability-AI/generative-models")
class CastsTheBatchToSelfDtype(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = (tensor.to(self.dtype) for tensor in batch)
        return super().loss((x, y))


@idiom("pyannote/pyannote-audio, core/model.py; facebookresearch/fastMRI; speechbrain")
class MakesNoiseOnSelfDevice(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        noise = torch.linspace(-1, 1, x.numel(), device=self.device, dtype=x.dtype).view_as(x)
        return super().loss((x + 0.1 * noise, y))


@idiom("CompVis/stable-diffusion, ldm/models/diffusion/ddpm.py; BlinkDL/RWKV-LM; openvpi/DiffSinger")
class ReadsTheDtypeOfAParameter(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        dtype = next(self.net.parameters()).dtype
        return super().loss((x.to(dtype), y))


@idiom("jwohlwend/boltz, boltz1.py; torchmd/torchmd-net, module.py; allenai/longformer, summarization.py")
class LogsTheRateOfTheFirstGroup(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        rate = loss.new_zeros(1) + self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("lr", rate)
        self.log("train_loss", loss, prog_bar=True)
        return loss


@idiom("TencentARC/InstantMesh, zero123plus/model.py; CompVis/stable-diffusion, ddpm.py")
class LogsTheRateOfSelfOptimizers(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("lr_abs", self.optimizers().param_groups[0]["lr"], prog_bar=True, on_step=True, on_epoch=False)
        self.log("global_step", float(self.global_step))
        return loss


@idiom("haoheliu/AudioLDM-training-finetuning, sequence_input.py; voicepaw/so-vits-svc-fork")
class SetsTheRateByHandEachStep(Base):
    def on_train_batch_start(self, *rest: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 3)


@idiom("ashleve/lightning-hydra-template, train.py; shivammehta25/Matcha-TTS, train.py; unit8co/darts")
def reads_callback_metrics(host: Host) -> None:
    class Logs(Base):
        def on_validation_epoch_end(self) -> None:
            self.note("val_loss", self.trainer.callback_metrics["val_loss"])

    host.fit(Logs(), max_epochs=2, val_dataloaders=host.data(2, seed=11))


@idiom("vturrisi/solo-learn, methods/base.py; baudm/parseq, abinet/system.py; lightly-ai/lightly-train, densecl.py")
class ReadsEstimatedSteppingBatches(Base):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@idiom("lightly-ai/lightly, benchmarks/imagenet/vitb16/dino.py; NVlabs, openvpi/DiffSinger")
class DecaysWeightsByTheGlobalStep(Base):
    """DINO sets each group's weight decay in on_before_optimizer_step."""

    def on_before_optimizer_step(self, optimizer: Any, *rest: Any) -> None:
        decay = 0.04 + 0.36 * (1 - math.cos(math.pi * self.trainer.global_step / STEPS)) / 2
        for group in optimizer.param_groups:
            if group.get("weight_decay", 0) != 0:
                group["weight_decay"] = decay

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-4, weight_decay=0.04)


@idiom("HazyResearch/safari, callbacks/norms.py; NVIDIA-NeMo/NeMo; ecmwf/anemoi-core", refused=MOVED)
class LogsGradientNormsBeforeTheStep(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


@idiom("Lightning-Universe/lightning-bolts, swav_module.py; threestudio-project/threestudio", refused=MOVED)
class LogsGradientsAfterBackward(Base):
    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and name.endswith("head.weight"):
                gradient = parameter.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                self.log(f"grad/{name}", gradient.float().abs().mean())


@idiom("lightly-ai/lightly-train, _callbacks; NVIDIA-NeMo/NeMo, exp_manager.py; microsoft/hi-ml")
class ReadsTheLoopsCounters(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        self.note("step", trainer.global_step)
        self.note("epoch", self.current_epoch + trainer.current_epoch)
        self.note("batches", trainer.num_training_batches)
        self.note("ready", trainer.fit_loop._should_accumulate() is False)
        self.note("last", trainer.is_last_batch)
        self.note("accumulation", trainer.accumulate_grad_batches)
        return self.loss(batch)


@idiom("voicepaw/so-vits-svc-fork, train.py; fishaudio/fish-speech; NVIDIA-NeMo/NeMo")
class BranchesOnTrainerPrecision(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("half", "16" in str(self.trainer.precision))
        self.note("bf", "bf" in str(self.trainer.precision))
        return self.loss(batch)


@idiom("facebookresearch/d2go, lightning_task.py; threestudio-project/threestudio; microsoft/hi-ml, logging.py")
class ReadsTheLastRateOfLrSchedulers(Base):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("lr", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)


@idiom(
    "rhasspy/piper, vits/lightning.py; gemelo-ai/vocos, experiment.py; voicepaw/so-vits-svc-fork",
    findings={"zero2": "self.optimizers(use_pl_optimizer=False) is a list, as with stock DeepSpeed"},
)
class ReadsTheUnwrappedOptimizer(Base):
    def on_train_batch_end(self, *rest: Any) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.note("groups", len(optimizer.param_groups))
        self.note("parameters", sum(len(group["params"]) for group in optimizer.param_groups))


@idiom("zju3dv/LoFTR, lightning_loftr.py; Zasder3/train-CLIP, wrapper.py; vturrisi/solo-learn, misc.py")
class GathersFeaturesOfAllRanks(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.net.features(x).float()
        everyone = self.all_gather(features.detach()).flatten(0, -2).to(features.dtype)
        self.note("rows", len(everyone))
        contrast = (features @ everyone.t()).logsumexp(1).mean()
        return functional.mse_loss(self.net.head(features.to(x.dtype)).float(), y.float()) + 0.01 * contrast


@idiom("IDEA-CCNL/Fengshenbang-LM; lightly-ai/lightly, simclr.py", rounded={"ddp": "gradients come by other sums"})
class GathersFeaturesWithGradients(Base):
    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        everyone = self.all_gather(self.net.features(x).float(), sync_grads=True).flatten(0, -2)
        return (everyone.pow(2).mean() - 1.0).pow(2) + 0.0 * self.net.head(x).float().sum()


@idiom("microsoft/torchgeo; openclimatefix/graph_weather; ashleve/lightning-hydra-template")
class SyncsMetricsOfAllRanks(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        options = {"sync_dist": True, "batch_size": ROWS}
        self.log("train/loss", loss, on_step=True, on_epoch=True, **options)
        self.log_dict({"a": loss.detach() * 2, "b": loss.detach().sqrt()}, on_epoch=True, on_step=False, **options)
        return loss


@idiom("jdb78/pytorch-forecasting, base_model.py; scverse/scvi-tools; Nixtla/neuralforecast")
class ReturnsADictOfTensors(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = functional.mse_loss(out.float(), batch[1].float())
        return {"loss": loss, "n_samples": len(out), "out": out.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("out", outputs["out"].float().mean())


@idiom("Lightning-AI/tutorials; Unbabel/COMET; unitaryai/detoxify")
class KeepsOutputsForTheEpochsEnd(Base):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


@idiom("Stability-AI/generative-models; BlinkDL/RWKV-LM, model.py; kuleshov-group/mdlm")
class ReadsTheStrategysName(Base):
    def configure_optimizers(self) -> Any:
        strategy = self.trainer.strategy
        config = getattr(strategy, "config", None)
        offload = isinstance(config, dict) and config.get("zero_optimization", {}).get("offload_optimizer")
        assert not offload
        return super().configure_optimizers()


@idiom("threestudio-project/threestudio, systems/base.py; microsoft/mattergen; Mask3D")
class LogsParameterNorms(Base):
    def on_train_batch_end(self, *rest: Any) -> None:
        if self.trainer.global_step % 2 == 0:
            with torch.no_grad():
                norms = [torch.linalg.vector_norm(p.float()) for p in self.net.head.parameters()]
                norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
                self.log("weight_norm", torch.stack(norms).norm())


@idiom("fishaudio/fish-diffusion, hifisinger_v1.py; NVIDIA-NeMo/NeMo, audio_codec.py")
class StepsSchedulersByHand(ByHand):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.global_step % 2 == 0:
            scheduler.step()
        return loss


@idiom(
    "jdb78/pytorch-forecasting; NVIDIA-NeMo/NeMo; darts",
    differs={"zero2": "the state of a rank is that of its partition, as with DeepSpeed alone"},
)
class ReadsTheOptimizersState(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
        norms = [torch.linalg.vector_norm(b.float()) for b in buffers]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        self.note("momentum", torch.stack(norms).norm())
