"""Callbacks as public projects write them, and Lightning's own."""

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional

from idioms.host import Host
from idioms.nets import Base
from idioms.table import idiom

SHARDED = {"fsdp2": "with sharded weights", "zero2": "ZeRO"}


@idiom("jwohlwend/boltz, optim/ema.py; NVIDIA-NeMo/NeMo, callbacks/ema.py; threestudio; nequip")
def averages_of_the_state_dict(host: Host) -> None:
    """The weights are swapped with load_state_dict around validation, and restored."""

    class Ema(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.average = {name: value.detach().clone() for name, value in module.state_dict().items()}

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            for name, weight in module.state_dict().items():
                difference = self.average[name].data - weight.data
                difference.mul_(0.1)
                self.average[name].sub_(difference)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if hasattr(self, "average"):
                self.kept = {name: value.detach().clone() for name, value in module.state_dict().items()}
                module.load_state_dict(self.average, strict=False)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if hasattr(self, "kept"):
                module.load_state_dict(self.kept, strict=False)
                del self.kept

    host.fit(Base(), callbacks=[Ema()], max_epochs=2, val_dataloaders=host.data(2, seed=11))


class LitEma(nn.Module):
    """An average in buffers, as of ldm."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.names = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                short = name.replace(".", "")
                self.names[name] = short
                self.register_buffer(short, parameter.clone().detach().data)
        self.collected: list[Tensor] = []

    def forward(self, model: nn.Module) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            named, shadow = dict(model.named_parameters()), dict(self.named_buffers())
            for name, short in self.names.items():
                shadow[short] = shadow[short].type_as(named[name])
                shadow[short].sub_((1.0 - decay) * (shadow[short] - named[name]))

    def store(self, parameters: Any) -> None:
        self.collected = [parameter.clone() for parameter in parameters]

    def copy_to(self, model: nn.Module) -> None:
        shadow = dict(self.named_buffers())
        for name, parameter in model.named_parameters():
            if name in self.names:
                parameter.data.copy_(shadow[self.names[name]].data)

    def restore(self, parameters: Any) -> None:
        for kept, parameter in zip(self.collected, parameters, strict=True):
            parameter.data.copy_(kept.data)


@idiom(
    "CompVis/stable-diffusion, ddpm.py and ema.py; VideoCrafter; DynamiCrafter; SEED-Voken; Paint-by-Example",
    refused={
        **dict.fromkeys(("fsdp2 bf16-mixed", "fsdp2 16-mixed"), "something reads or writes its values there"),
        "fsdp2": "computes with sharded weights and plain tensors together",
    },
)
def litema_in_the_module(host: Host) -> None:
    class Ema(Base):
        def __init__(self) -> None:
            super().__init__()
            self.model_ema = LitEma(self.net)

        def on_train_batch_end(self, *rest: Any) -> None:
            self.model_ema(self.net)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)
            self.model_ema.store(self.net.parameters())
            self.model_ema.copy_to(self.net)
            self.log("val_loss_ema", self.loss(batch), sync_dist=True)
            self.model_ema.restore(self.net.parameters())

    host.fit(Ema(), max_epochs=2, val_dataloaders=host.data(2, seed=11))


@idiom(
    "lightning's docs; facebookresearch/multimodal, omnivore; torch.optim.swa_utils",
    refused={"fsdp2": "FSDP does not support deepcopy. Please use state dict"},
)
def averaged_model_in_a_callback(host: Host) -> None:
    class Average(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.average = torch.optim.swa_utils.AveragedModel(module.net)

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            self.average.update_parameters(module.net)

    callback = Average()
    host.fit(Base(), callbacks=[callback])


@idiom("Lightning's EMAWeightAveraging", refused=SHARDED)
def lightnings_ema(host: Host) -> None:
    host.fit(Base(), callbacks=[EMAWeightAveraging(decay=0.9)], max_epochs=2, val_dataloaders=host.data(2, seed=11))


@idiom("Lightning's StochasticWeightAveraging; asteroid; chemprop", refused=SHARDED | {"zero2": "sharded models"})
def lightnings_swa(host: Host) -> None:
    swa = lightnings.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)
    host.fit(Base(), callbacks=[swa], max_epochs=3)


@idiom("lightning-bolts, byol_updates.py; microsoft/hi-ml, byol_moving_average.py")
def byol_weight_update(host: Host) -> None:
    class Byol(Base):
        def __init__(self) -> None:
            super().__init__()
            self.online_network = self.net
            self.target_network = deepcopy(self.net).requires_grad_(False)

        def loss(self, batch: Any) -> Tensor:
            with torch.no_grad():
                target = self.target_network(batch[0]).float()
            return super().loss(batch) + functional.mse_loss(self.online_network(batch[0]).float(), target)

    class Update(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            online, target = module.online_network, module.target_network
            for (_, p), (_, q) in zip(online.named_parameters(), target.named_parameters(), strict=True):
                q.data = 0.9 * q.data + (1 - 0.9) * p.data

    host.fit(Byol(), callbacks=[Update()])


@idiom(
    "fishaudio/fish-speech, grad_norm.py; gemelo-ai/vocos, helpers.py; NVIDIA/bionemo-framework, grad_norm_callback.py",
    refused={"zero2": "reads parameter.grad, which is None here"},
)
def logs_gradient_norms_after_backward(host: Host) -> None:
    class GradNorm(Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norms = torch._foreach_norm([g.detach() for g in gradients], 2.0)
            norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
            module.log("train/grad_norm", torch.norm(torch.stack(norms), 2.0))

    host.fit(Base(), callbacks=[GradNorm()])


@idiom(
    "scverse/scvi-tools, cellassign/_model.py: ClampCallback; YosefLab/scvi-tools",
)
def clamps_a_parameter(host: Host) -> None:
    class Clamp(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            with torch.inference_mode():
                module.net.head.weight.clamp_(min=-0.2, max=0.2)

    host.fit(Base(), callbacks=[Clamp()])


@idiom("karpathy/deep-vector-quantization, dvq/vqvae.py: DecayTemperature, RampBeta, DecayLR")
def decays_attributes_and_the_rate(host: Host) -> None:
    class Decays(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            module.temperature = 1.0 / (1 + trainer.global_step)
            optimizer = trainer.optimizers[0]
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + trainer.global_step)

    class Tempered(Base):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.temperature

    host.fit(Tempered(), callbacks=[Decays()])


@idiom(
    "pyannote/pyannote-audio, callback.py: GraduallyUnfreeze; fairchem; hi-ml",
    refused={"zero2": "frozen or unfrozen in a run with ZeRO"},
)
def unfreezes_by_epochs(host: Host) -> None:
    class Unfreeze(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.net.blocks.requires_grad_(False)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                module.net.blocks.requires_grad_(True)

    host.fit(Base(), callbacks=[Unfreeze()], max_epochs=2, unused=True)


@idiom(
    "Lightning's BackboneFinetuning; lightning-flash, finetuning.py; microsoft/torchgeo",
    refused={"zero2": "Finetuning callback does not support running with the DeepSpeed strategy"},
    differs=dict.fromkeys(("ddp", "fsdp2"), "stock DDP does not sum gradients of what is unfrozen in a run"),
)
def lightnings_backbone_finetuning(host: Host) -> None:
    class Backbone(Base):
        @property
        def backbone(self) -> nn.Module:
            return self.net.blocks

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    finetuning = lightnings.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    host.fit(Backbone(), callbacks=[finetuning], max_epochs=3)


@idiom("CompVis/stable-diffusion, main.py: ImageLogger; ControlNet, logger.py; taming-transformers; instruct-pix2pix")
def logs_images_in_training(host: Host) -> None:
    """The callback runs the module in eval mode within on_train_batch_end."""

    class ImageLogger(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                training = module.training
                if training:
                    module.eval()
                with torch.no_grad():
                    module.note("image", module(batch[0]).float().abs().mean())
                if training:
                    module.train()

    host.fit(Base(), callbacks=[ImageLogger()])


@idiom("audio-diffusion-pytorch-trainer; graph_weather, SamplingCallback; stable-audio-tools; Lightning-AI/tutorials")
def samples_at_the_epochs_end(host: Host) -> None:
    class Samples(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.eval()
            with torch.no_grad():
                x = torch.ones(2, 8, device=module.device, dtype=module.dtype)
                module.note("sample", module.net(x).float().mean())
            module.train()

    host.fit(Base(), callbacks=[Samples()], max_epochs=2)


@idiom("rhasspy/piper, vits/lightning.py; Matcha-TTS; gemelo-ai/vocos: audio in on_validation_end")
def samples_in_validation_end(host: Host) -> None:
    class Sampling(Base):
        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                with torch.no_grad():
                    x = torch.ones(2, 8, device=self.device, dtype=self.dtype)
                    self.note("sample", self(x).float().mean())

    host.fit(Sampling(), max_epochs=2, val_dataloaders=host.data(2, seed=11))


@idiom("lightning-bolts, ssl_online.py and knn_online.py; hi-ml, ssl_online_evaluator.py; solo-learn, online linear")
def trains_a_probe_in_a_callback(host: Host) -> None:
    """A callback trains a head of its own on detached features."""

    class Online(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            torch.manual_seed(5)
            self.probe = nn.Linear(8, 1)
            self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.05)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                features = module.net.features(batch[0]).float()
            loss = functional.mse_loss(self.probe(features.detach()), batch[1].float())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            module.note("probe", loss)

    host.fit(Base(), callbacks=[Online()])


@idiom("facebookresearch/pytorchvideo, precise_batchnorm.py; detectron2")
def recomputes_batch_norms(host: Host) -> None:
    class Normed(Base):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

    class Precise(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.norm.reset_running_stats()
            with torch.no_grad():
                module.norm(torch.ones(4, 8, dtype=module.dtype).cumsum(0))

    host.fit(Normed(), callbacks=[Precise()], same_rows=True)


@idiom("Lightning's EarlyStopping, LearningRateMonitor, ModelSummary; used by nearly all")
def stops_early(host: Host) -> None:
    stop = lightnings.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    host.fit(Base(), callbacks=[stop], max_epochs=5, val_dataloaders=host.data(2, seed=11))


@idiom(
    "Lightning's GradientAccumulationScheduler",
    refused={"zero2": "does not support `accumulate_grad_batches` changing"},
)
def accumulates_on_a_schedule(host: Host) -> None:
    host.fit(Base(), callbacks=[lightnings.GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=2)


@idiom(
    "Lightning's ModelPruning; neuralmagic/sparseml; lightning-bolts, sparseml.py",
    refused=SHARDED,
    left_out={"bf16-true": "stock ends in a dtype error too"},
)
def lightnings_pruning(host: Host) -> None:
    pruning = lightnings.ModelPruning("l1_unstructured", amount=0.5, use_global_unstructured=True)
    host.fit(Base(), callbacks=[pruning], max_epochs=2)


@idiom("facebookresearch/ReAgent; litgpt; fish-speech: trainer.should_stop in a hook")
def stops_itself(host: Host) -> None:
    class Stops(Base):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.trainer.should_stop = True

    host.fit(Stops())


@idiom("NVIDIA-NeMo/NeMo; unit8co/darts: configure_callbacks of the module; boltz2.py; audio_to_audio.py")
def module_configures_callbacks(host: Host) -> None:
    class Own(Base):
        def configure_callbacks(self) -> Any:
            return [lightnings.EarlyStopping("val_loss", patience=0, min_delta=100.0)]

    host.fit(Own(), max_epochs=5, val_dataloaders=host.data(2, seed=11))


@idiom("Lightning-AI/tutorials, SamplerCallback; graph_weather; trainer.fit within callbacks' on_exception")
def skips_a_batch_in_on_train_batch_start(host: Host) -> None:
    class Skips(Base):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 else None

    host.fit(Skips())
