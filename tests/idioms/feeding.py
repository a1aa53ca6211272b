"""Loaders, samplers, batches, loggers and flags of the Trainer as public projects use them."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from idioms.host import ROWS, WIDTH, Host
from idioms.nets import Base
from idioms.table import idiom


class Rows(Dataset[Any]):
    """Rows by number, as dicts."""

    def __init__(self, host: Host, count: int = 24) -> None:
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3 + host.rank))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "y": self.x[index].sum(0, keepdim=True), "name": f"row{index}", "index": index}


class Dicts(Base):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]))


@idiom("unitaryai/detoxify; NVIDIA-NeMo; pytorch-forecasting: batches are dicts with strings and integers")
def batches_are_dicts(host: Host) -> None:
    host.fit(Dicts(), data=DataLoader(Rows(host), batch_size=ROWS))


@idiom("ashleve/lightning-hydra-template; torchgeo; anomalib: a LightningDataModule")
def a_data_module(host: Host) -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.rows = Rows(host)

        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, batch_size=ROWS)

        def val_dataloader(self) -> Any:
            return DataLoader(self.rows, batch_size=ROWS)

    host.fit(Dicts(), data=Data(), max_epochs=2)


@idiom("solo-learn, dali; lightly; multimodal: several loaders of training in a dict")
def loaders_in_a_dict(host: Host) -> None:
    class Both(Base):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["a"]) + 0.5 * super().loss(batch["b"])

    host.fit(Both(), data={"a": host.data(), "b": host.data(3, seed=5)})


@idiom("hi-ml, combined dataloader; litgpt; CombinedLoader with max_size_cycle")
def loaders_that_cycle(host: Host) -> None:
    class Both(Base):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["a"]) + super().loss(batch["b"])

    host.fit(Both(), data=CombinedLoader({"a": host.data(4), "b": host.data(2, seed=5)}, "max_size_cycle"))


@idiom("litgpt; uni2ts; NVIDIA-NeMo: an IterableDataset without a length")
def iterable_datasets(host: Host) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Rows(host))

    host.fit(Dicts(), data=DataLoader(Stream(), batch_size=ROWS))


@idiom("torchdrug; asteroid; lama: limit_train_batches and max_steps of an endless stream")
def endless_streams(host: Host) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            rows = Rows(host)
            while True:
                yield from rows

    host.fit(Dicts(), data=DataLoader(Stream(), batch_size=ROWS), max_steps=5, max_epochs=-1)


@idiom("microsoft/torchgeo, samplers; retinaface; chemprop: a sampler of its own")
def weighted_samplers(host: Host) -> None:
    generator = torch.Generator().manual_seed(2)
    sampler = WeightedRandomSampler([1.0] * 12 + [3.0] * 12, 24, generator=generator)
    host.fit(Dicts(), data=DataLoader(Rows(host), batch_size=ROWS, sampler=sampler))


@idiom("VITS, distributed bucket sampler; piper; openspeech: batches of unequal sizes")
def batches_of_unequal_sizes(host: Host) -> None:
    host.fit(Dicts(), data=DataLoader(Rows(host), batch_sampler=[[0, 1, 2], [3, 4, 5, 6, 7], [8], [9, 10]]))


@idiom("NVIDIA-NeMo, asr; openspeech; fish-speech: a collate that pads, and lengths beside")
def padded_sequences(host: Host) -> None:
    def collate(rows: Any) -> Any:
        lengths = torch.tensor([1 + row["index"] % 3 for row in rows])
        x = torch.stack([row["x"].repeat(3, 1) for row in rows])
        mask = torch.arange(3)[None] < lengths[:, None]
        return {"x": x * mask[..., None], "mask": mask, "lengths": lengths, "y": torch.stack([r["y"] for r in rows])}

    class Masked(Base):
        def loss(self, batch: Any) -> Tensor:
            out = self(batch["x"])[..., 0].masked_fill(~batch["mask"], 0.0)
            return functional.mse_loss((out.sum(1) / batch["lengths"]).float(), batch["y"][:, 0].float())

    host.fit(Masked(), data=DataLoader(Rows(host), batch_size=ROWS, collate_fn=collate))


@idiom("torch-geometric users, mattergen; cdvae; nequip: a batch of an own class with to()")
def batches_of_an_own_class(host: Host) -> None:
    class Graph:
        def __init__(self, x: Tensor, edges: Tensor) -> None:
            self.x, self.edges = x, edges

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            return Graph(self.x.to(device), self.edges.to(device))

    def collate(rows: Any) -> Graph:
        return Graph(torch.stack([row["x"] for row in rows]), torch.arange(len(rows)).roll(1))

    class Message(Base):
        def loss(self, graph: Any) -> Tensor:
            x = graph.x.to(self.dtype)
            summed = torch.zeros_like(x).index_add_(0, graph.edges, x)
            return (self(x + summed).float() - 1.0).pow(2).mean()

    host.fit(Message(), data=DataLoader(Rows(host), batch_size=ROWS, collate_fn=collate))


@idiom("ReAgent, rl; lightning-bolts, dqn: the loader is made anew each epoch")
def reloads_loaders_each_epoch(host: Host) -> None:
    class Reloads(Base):
        def train_dataloader(self) -> Any:
            return host.data(3, seed=20 + self.current_epoch)

    host.fit(Reloads(), data=False, max_epochs=3, reload_dataloaders_every_n_epochs=1)


@idiom("safari; s4; darts: validation of several loaders")
def several_validation_loaders(host: Host) -> None:
    class Validates(Base):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"val/{dataloader_idx}", self.loss(batch), add_dataloader_idx=False, sync_dist=True)

    host.fit(Validates(), val_dataloaders=[host.data(2, seed=11), host.data(2, seed=12)], val_check_interval=3)


@idiom(
    "torchmetrics in torchgeo; ashleve's template; anomalib: a metric as a submodule, logged by name",
    rounded={"bf16-true": "metrics keep their sums in fp32"},
)
def metrics_as_submodules(host: Host) -> None:
    from torchmetrics import MeanSquaredError

    class Measures(Base):
        def __init__(self) -> None:
            super().__init__()
            self.train_mse, self.val_mse = MeanSquaredError(), MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            self.train_mse(out.float().detach(), batch[1].float())
            self.log("train/mse", self.train_mse, on_step=False, on_epoch=True)
            return functional.mse_loss(out.float(), batch[1].float())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_mse.update(self(batch[0]).float(), batch[1].float())

        def on_validation_epoch_end(self) -> None:
            self.log("val/mse", self.val_mse.compute(), sync_dist=True)
            self.val_mse.reset()

    host.fit(Measures(), max_epochs=2, val_dataloaders=host.data(2, seed=11))


@idiom("lightning-flash; hi-ml; speech: a metric that keeps its predictions in a list state")
def metrics_with_list_states(host: Host) -> None:
    from torchmetrics import CatMetric

    class Keeps(Base):
        def __init__(self) -> None:
            super().__init__()
            self.outputs = CatMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.outputs.update(loss.detach().float())
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("mean", self.outputs.compute().mean())
            self.outputs.reset()

    host.fit(Keeps(), max_epochs=2)


class Notes(Logger):
    """A project's own logger: it keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, dict[str, float]]] = []
        self.hyperparameters: Any = None

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.kept.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters = dict(params)


@idiom("darts; nuplan; DiffSinger, basics: a Logger of their own")
def own_loggers(host: Host) -> None:
    logger = Notes()

    class Logs(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train/loss", loss)
            return loss

    module = Logs()
    host.fit(module, logger=logger, log_every_n_steps=1)
    module.seen["logged"] = [values["train/loss"] for _, values in logger.kept if "train/loss" in values]


@idiom("piper; vocos; LoFTR: self.logger.experiment.add_scalar and log_metrics by hand")
def logs_to_the_experiment(host: Host) -> None:
    class Logs(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if self.global_rank == 0:
                self.logger.experiment.add_scalar("loss", loss.item(), self.global_step)
                self.logger.log_metrics({"by_hand": float(loss)}, step=self.global_step)
            return loss

    host.fit(Logs(), logger=DummyLogger())


@idiom("torchgeo; asteroid: a CSVLogger with hyperparameters")
def csv_loggers(host: Host) -> None:
    class Logs(Base):
        def __init__(self, rate: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            return loss

    host.fit(Logs(), logger=CSVLogger(host.folder, name="csv"), log_every_n_steps=2)


@idiom("Lightning's flags: overfit_batches, limit_val_batches, check_val_every_n_epoch; s4; safari")
def flags_of_the_trainer(host: Host) -> None:
    options = {"overfit_batches": 2, "limit_val_batches": 1, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    host.fit(Base(), max_epochs=4, val_dataloaders=host.data(2, seed=11), **options)


@idiom("Lightning's flag detect_anomaly; nequip; diffusion")
def detects_anomalies(host: Host) -> None:
    host.fit(Base(), detect_anomaly=True)


@idiom("Lightning's flag inference_mode=False; pytorch-forecasting; schnetpack: gradients in validation")
def gradients_in_validation(host: Host) -> None:
    class Forces(Base):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                x = batch[0].detach().requires_grad_(True)
                (gradient,) = torch.autograd.grad(self(x).sum(), x)
            self.log("force", gradient.float().norm(), sync_dist=True)

    host.fit(Forces(), val_dataloaders=host.data(2, seed=11), inference_mode=False)


@idiom("lightly; fastMRI; MONAI tutorials: uint8 images and integer labels are cast in the step")
def integers_in_batches(host: Host) -> None:
    class Classifies(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net.head = nn.Linear(WIDTH, 3)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return functional.cross_entropy(self(x.to(self.dtype) / 255.0).float(), y)

    generator = torch.Generator().manual_seed(4 + host.rank)
    x = torch.randint(0, 255, (24, WIDTH), dtype=torch.uint8, generator=generator)
    host.fit(Classifies(), data=DataLoader(TensorDataset(x, x.sum(1) % 3), batch_size=ROWS))


@idiom("cdvae; schnetpack; fastMRI: batches in float64, cast by the module")
def doubles_in_batches(host: Host) -> None:
    class Casts(Base):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(tuple(tensor.to(self.dtype) for tensor in batch))

    x = torch.randn(24, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4 + host.rank))
    host.fit(Casts(), data=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=ROWS))


@idiom(
    "GPT-SoVITS; darts: training_step returns None for bad batches",
    left_out={"ddp": "refused by Lightning in distributed training", "fsdp2": "as under DDP", "zero2": "as under DDP"},
)
def returns_none_for_some_batches(host: Host) -> None:
    class Skips(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else self.loss(batch)

    host.fit(Skips())
