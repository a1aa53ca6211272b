"""How public projects save and load: hooks of checkpoints, state dicts of their own, resumed and loaded runs."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from idioms.host import Host
from idioms.nets import Base
from idioms.table import idiom


def resumed(host: Host, make: Callable[[], LightningModule], **options: Any) -> None:
    """Train an epoch, save, and train a second epoch in another Trainer from the file."""
    path = host.folder / "saved.ckpt"
    callbacks = options.pop("callbacks", list)
    host.fit(make(), callbacks=callbacks(), **options).save_checkpoint(path)
    host.fit(make(), callbacks=callbacks(), max_epochs=2, ckpt_path=path, weights_only=False, **options)


class Momentum(Base):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@idiom("nearly all: trainer.fit(model, ckpt_path=...)")
def resumes(host: Host) -> None:
    resumed(host, Momentum)


@idiom("Lightning's ModelCheckpoint: save_top_k, save_last, every_n_train_steps; ashleve; NeMo")
def saves_by_callback_and_resumes(host: Host) -> None:
    saves = ModelCheckpoint(dirpath=host.folder / "kept", save_last=True, every_n_train_steps=3)
    host.fit(Momentum(), callbacks=[saves], enable_checkpointing=True)
    host.fit(Momentum(), max_epochs=2, ckpt_path=saves.last_model_path, weights_only=False)


class KeepsACount(Momentum):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.note("count", self.count)
        return self.loss(batch)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.count = checkpoint["count"]


@idiom("stable-audio-tools, train.py; lightning-flash, loop.py; mmdet; jdb78/pytorch-forecasting")
def keeps_a_count_in_the_checkpoint(host: Host) -> None:
    resumed(host, KeepsACount)


class DropsTheHead(Momentum):
    def on_load_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            if "head" in name:
                state[name] = torch.zeros_like(state[name])


@idiom("anomalib; scvi; NVIDIA-NeMo, modelPT.py; voicepaw/so-vits-svc-fork: weights are changed as they are loaded")
def changes_weights_on_load(host: Host) -> None:
    resumed(host, DropsTheHead)


class RenamesOnLoad(Momentum):
    """The names of an older release."""

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {
            name.replace("net.", "model."): value for name, value in checkpoint["state_dict"].items()
        }

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {
            name.replace("model.", "net."): value for name, value in checkpoint["state_dict"].items()
        }


@idiom("openfold, import_weights; torch-lightning upgrades; boltz; Matcha-TTS: names are changed as they are loaded")
def renames_on_save_and_load(host: Host) -> None:
    resumed(host, RenamesOnLoad)


class LeavesOutTheTeacher(Momentum):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.strict_loading = False

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).float()
        return super().loss(batch) + (self(batch[0]).float() - target).pow(2).mean()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher.")]:
            del checkpoint["state_dict"][name]


@idiom("gemelo-ai/vocos; NVIDIA-NeMo; DiffSinger; lightly-train: frozen parts are left out of the file")
def leaves_out_the_teacher(host: Host) -> None:
    resumed(host, LeavesOutTheTeacher)


class StateDictOfAPart(Momentum):
    """As SEED-Voken and generative-models leave a loss's weights out: state_dict and load_state_dict overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.metric_net = nn.Linear(8, 1).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "metric" not in name}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


@idiom("SEED-Voken, cond_transformer_llama.py; generative-models; anomalib; TencentARC/InstantMesh")
def overrides_state_dict(host: Host) -> None:
    resumed(host, StateDictOfAPart)


class EmaInTheCheckpoint(Callback):
    def __init__(self) -> None:
        self.average: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        now = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if self.average is None:
            self.average = now
        self.average = {name: 0.9 * self.average[name] + 0.1 * value for name, value in now.items()}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        norms = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in self.average.values()]
        module.note("ema", sum(norm.float().norm() for norm in norms))

    def state_dict(self) -> Any:
        return {"average": self.average}

    def load_state_dict(self, state_dict: Any) -> None:
        self.average = state_dict["average"]


@idiom(
    "jwohlwend/boltz, ema.py; NeMo, ema.py; schnetpack, callbacks.py: an average in the callback's state",
    findings={"fsdp2": "a callback's state holds the first rank's shards after it was loaded"},
)
def keeps_an_average_in_a_callbacks_state(host: Host) -> None:
    resumed(host, Momentum, callbacks=lambda: [EmaInTheCheckpoint()])


@idiom("ashleve/lightning-hydra-template, train.py: trainer.test(ckpt_path=best)")
def tests_the_best_checkpoint(host: Host) -> None:
    class Tested(Momentum):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    saves = ModelCheckpoint(dirpath=host.folder / "best", monitor="val_loss", save_top_k=1)
    module = Tested()
    loader = host.data(2, seed=11)
    trainer = host.fit(module, callbacks=[saves], enable_checkpointing=True, max_epochs=2, val_dataloaders=loader)
    trainer.test(module, loader, ckpt_path="best", verbose=False, weights_only=False)
    host.kept["metrics"] |= {name: float(value) for name, value in trainer.callback_metrics.items()}


@idiom("darts; pytorch-forecasting; torchgeo: load_from_checkpoint after the fit, then predict")
def loads_and_predicts(host: Host) -> None:
    class Predicts(Momentum):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    trainer = host.fit(Predicts())
    predicted = trainer.predict(trainer.lightning_module, host.data(2, seed=11))
    host.kept["predicted"] = torch.cat(predicted).float()


@idiom("timm users, stable-diffusion, main.py: init_from_ckpt, load_state_dict(strict=False) before the fit")
def loads_a_state_dict_before_the_fit(host: Host) -> None:
    torch.manual_seed(9)
    state = {
        name: torch.randn_like(value) * 0.3 for name, value in Momentum().state_dict().items() if "head" not in name
    }
    module = Momentum()
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert len(missing) == 2
    assert not unexpected
    host.fit(module)


@idiom("lightly benchmarks; COMET: a second fit, of the same module, with another Trainer")
def fits_twice(host: Host) -> None:
    module = Momentum()
    host.fit(module)
    host.fit(module)


@idiom("fastMRI; darts: validate and test before and after the fit")
def validates_before_and_after(host: Host) -> None:
    module, loader = Momentum(), host.data(2, seed=11)
    trainer = host.trainer()
    trainer.validate(module, loader, verbose=False)
    before = float(trainer.callback_metrics["val_loss"])
    trainer.fit(module, host.data())
    trainer.validate(module, loader, verbose=False)
    host.keep(trainer, module)
    host.kept["seen"] = {"before": before}


@idiom("hi-ml; nnDetection; d2go: torch.save(module.state_dict()) in on_train_end")
def saves_by_torch_at_the_end(host: Host) -> None:
    folder: Path = host.folder

    class Saves(Momentum):
        def on_train_end(self) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.state_dict(), folder / f"plain{self.global_rank}.pt")

    host.fit(Saves())
    state = torch.load(folder / f"plain{host.rank}.pt", weights_only=False)
    state = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    host.kept["seen"] = state


@idiom("lightning-hydra-template; nequip: save_hyperparameters, and hparams read in the step")
def reads_hyperparameters(host: Host) -> None:
    class Hyper(Momentum):
        def __init__(self, weight: float = 0.5, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def loss(self, batch: Any) -> Tensor:
            return self.hparams.weight * super().loss(batch)

    resumed(host, Hyper)
