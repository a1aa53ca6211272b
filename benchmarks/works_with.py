"""Packages built on Lightning or trained by it, under a plan: what docs/reference/works-with.md says, by running it.

``make works-with`` (``python -m benchmarks.works_with [PACKAGE ...]``): each in its own process, three steps a run.
"""

import argparse
import copy
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.planner_pages import DOCS, write

STEPS = 3
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
HERE = {"accelerator": "cpu", "devices": 1}
#: units of bf16's roundoff by which losses may differ from fp32's: the models are a few layers deep
ROUNDINGS = 16
#: what was trained, what it predicts, and what is predicted once it was saved and loaded
Outcome = tuple[Any, Any, Any]


def task(net: Any, loss: Callable[..., Any], batch: Any) -> Any:
    """A LightningModule of pytorch_lightning around ``net``, which takes the batch's tensors."""
    import pytorch_lightning as pl

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, tensors: Any, batch_idx: int) -> Any:
            return loss(self.net, *tensors)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-3)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([batch] * STEPS, batch_size=None)

    return Task()


def fit(module: Any, given: dict[str, Any], *data: Any, host: str = "pytorch_lightning") -> Any:
    trainer = importlib.import_module(host).Trainer(max_steps=STEPS, **HERE, **QUIET, **given)
    trainer.fit(module, *data)
    return trainer


def predicted(net: Any, *inputs: Any) -> Any:
    """What ``net`` says in evaluation, in fp32."""
    with torch.no_grad():
        found = net.eval()(*inputs)
    return getattr(found, "logits", found)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16))


def transformers(given: dict[str, Any], folder: Path) -> Outcome:
    from transformers import GPT2LMHeadModel

    return _fine_tuned(_gpt2(), given, folder, GPT2LMHeadModel.from_pretrained)


def peft(given: dict[str, Any], folder: Path) -> Outcome:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = _gpt2()
    net = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return _fine_tuned(net, given, folder, partial(PeftModel.from_pretrained, base))


def _fine_tuned(net: Any, given: dict[str, Any], folder: Path, load: Callable[..., Any]) -> Outcome:
    tokens = torch.randint(64, (4, 16))
    fit(task(net, lambda net, tokens: net(input_ids=tokens, labels=tokens).loss, (tokens,)), given)
    net.save_pretrained(folder)
    return net, predicted(net, tokens), predicted(load(folder), tokens)


def bitsandbytes(given: dict[str, Any], folder: Path) -> Outcome:
    import bitsandbytes as bnb

    def made() -> Any:
        frozen = bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.bfloat16)
        return nn.Sequential(nn.Linear(64, 64), frozen.requires_grad_(False).to("cpu"), nn.Linear(64, 1))

    net, x = made(), torch.randn(8, 64)
    fit(task(net, lambda net, x: net(x).float().square().mean(), (x,)), given)
    torch.save({name: value for name, value in net.state_dict().items() if "1." not in name[:2]}, folder / "net.pt")
    loaded = copy.deepcopy(net)
    nn.init.zeros_(loaded[0].weight)
    loaded.load_state_dict(torch.load(folder / "net.pt"), strict=False)
    return net, predicted(net, x), predicted(loaded, x)


def timm(given: dict[str, Any], folder: Path) -> Outcome:
    import timm

    net, x = timm.create_model("test_vit", num_classes=4, img_size=32), torch.randn(4, 3, 32, 32)
    labels = torch.arange(4)
    fit(task(net, lambda net, x, labels: torch.nn.functional.cross_entropy(net(x), labels), (x, labels)), given)
    torch.save(net.state_dict(), folder / "net.pt")
    loaded = timm.create_model("test_vit", num_classes=4, img_size=32, checkpoint_path=str(folder / "net.pt"))
    return net, predicted(net, x), predicted(loaded, x)


def darts(given: dict[str, Any], folder: Path) -> Outcome:
    from darts import TimeSeries
    from darts.models import TiDEModel

    series = TimeSeries.from_values(np.sin(np.arange(60, dtype=np.float32)))
    keywords = {"n_epochs": 1, "batch_size": 16, "random_state": 0, "hidden_size": 16}
    kept = {**HERE, "max_steps": STEPS, "enable_progress_bar": False, **given}
    model = TiDEModel(12, 4, pl_trainer_kwargs=kept, **keywords)
    model.fit(series)
    model.save(str(folder / "model.pt"))
    before = model.predict(4).values()
    return model.model, before, TiDEModel.load(str(folder / "model.pt")).predict(4).values()


def neuralforecast(given: dict[str, Any], folder: Path) -> Outcome:
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    y = np.sin(np.arange(60)).astype("float32")
    frame = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2020-01-01", periods=60), "y": y})
    model = NHITS(h=4, input_size=8, max_steps=STEPS, mlp_units=[[16, 16]] * 3, **HERE, **QUIET, **given)
    forecast = NeuralForecast([model], freq="D")
    forecast.fit(frame)
    forecast.save(str(folder / "model"), overwrite=True)
    loaded = NeuralForecast.load(str(folder / "model"))
    loaded.models[0].trainer_kwargs.update(given)  # it keeps neither plugins nor strategy, and says so
    both = (forecast, loaded)
    return forecast.models[0], *(one.predict()["NHITS"].to_numpy() for one in both)


def pytorch_forecasting(given: dict[str, Any], folder: Path) -> Outcome:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    frame = pd.DataFrame({"t": np.arange(60), "y": np.sin(np.arange(60.0)), "g": "a"})
    data = TimeSeriesDataSet(
        frame, "t", "y", ["g"], max_encoder_length=12, max_prediction_length=4, time_varying_unknown_reals=["y"]
    )
    model = TemporalFusionTransformer.from_dataset(data, hidden_size=8, dropout=0.0, mask_bias=-float("inf"))
    batches = data.to_dataloader(train=True, batch_size=8, shuffle=False)
    trainer = fit(model, given, batches, host="lightning.pytorch")
    trainer.save_checkpoint(folder / "model.ckpt")
    loaded = TemporalFusionTransformer.load_from_checkpoint(folder / "model.ckpt", weights_only=False)
    loader, both = data.to_dataloader(train=False, batch_size=8), (model, loaded)
    return model, *(one.predict(loader, trainer_kwargs={**HERE, **QUIET}) for one in both)


def gluonts(given: dict[str, Any], folder: Path) -> Outcome:
    from gluonts.dataset.common import ListDataset
    from gluonts.model.predictor import Predictor
    from gluonts.torch import SimpleFeedForwardEstimator

    data = ListDataset([{"start": "2020-01-01", "target": np.sin(np.arange(60.0))}], freq="D")
    kept = {"max_steps": STEPS, **HERE, **QUIET, **given, "enable_checkpointing": True, "default_root_dir": str(folder)}
    np.random.seed(0)
    estimator = SimpleFeedForwardEstimator(4, 12, hidden_dimensions=[16], num_batches_per_epoch=3, trainer_kwargs=kept)
    predictor = estimator.train(data)
    predictor.serialize(folder)
    both = (predictor, Predictor.deserialize(folder))
    return predictor.prediction_net, *(next(iter(one.predict(data))).mean for one in both)


def scvi_tools(given: dict[str, Any], folder: Path) -> Outcome:
    import anndata
    import scvi

    scvi.settings.seed = 0
    data = anndata.AnnData(np.random.default_rng(0).poisson(2.0, (128, 32)).astype("float32"))
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=16, n_latent=4)
    model.train(max_epochs=STEPS, **HERE, **QUIET, **given)
    model.save(str(folder / "model"), overwrite=True)
    before = model.get_latent_representation()
    loaded = scvi.model.SCVI.load(str(folder / "model"), adata=data, accelerator="cpu")
    return model.module, before, loaded.get_latent_representation()


def chemprop(given: dict[str, Any], folder: Path) -> Outcome:
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(smi, np.array([float(len(smi))])) for smi in ("CCO", "CC", "CCN", "CO")]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False)
    model = models.MPNN(nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(16, 16))
    fit(model, given, loader, host="lightning.pytorch")
    other = importlib.import_module("lightning.pytorch").Trainer(**HERE, **QUIET)
    models.save_model(folder / "model.pt", model)
    both = (model, models.load_model(folder / "model.pt"))
    return model, *(torch.cat(other.predict(one, loader)) for one in both)


def matgl(given: dict[str, Any], folder: Path) -> Outcome:
    import matgl
    from matgl.ext.pymatgen import Structure2Graph
    from matgl.graph.data import MGLDataset, collate_fn_graph
    from matgl.models import MEGNet
    from matgl.utils.training import ModelLightningModule
    from pymatgen.core import Lattice, Structure

    elements, places = ("Mo", "S"), [[0, 0, 0], [0.5, 0.5, 0.5]]
    crystals = [Structure(Lattice.cubic(side), list(elements), places) for side in (3.0, 3.2, 3.4, 3.6)]
    graphs = Structure2Graph(element_types=elements, cutoff=4.0)
    labels = {"E": [1.0, 2.0, 3.0, 4.0]}
    data = MGLDataset(structures=crystals, converter=graphs, labels=labels, root=str(folder / "data"))
    model = MEGNet(element_types=elements, cutoff=4.0, dim_edge_embedding=16)
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate_fn_graph)
    fit(ModelLightningModule(model=model), given, loader, host="lightning.pytorch")
    model.save(folder / "model")
    both = (model, matgl.load_model(folder / "model"))
    return model, *(one.predict_structure(crystals[0]) for one in both)


def lightly(given: dict[str, Any], folder: Path) -> Outcome:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), SimCLRProjectionHead(32, 32, 16))
    loss, views = NTXentLoss(), torch.randn(2, 8, 3, 8, 8)
    trainer = fit(task(net, lambda net, a, b: loss(net(a), net(b)), tuple(views)), given)
    return net, *_checkpointed(trainer, net, folder, views[0])


def monai(given: dict[str, Any], folder: Path) -> Outcome:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,))
    loss, x, y = DiceLoss(softmax=True, to_onehot_y=True), torch.randn(4, 1, 16, 16), torch.randint(2, (4, 1, 16, 16))
    trainer = fit(task(net, lambda net, x, y: loss(net(x), y), (x, y)), given)
    return net, *_checkpointed(trainer, net, folder, x)


def _checkpointed(trainer: Any, net: Any, folder: Path, x: Any) -> tuple[Any, Any]:
    trainer.save_checkpoint(folder / "net.ckpt")
    found = torch.load(folder / "net.ckpt", weights_only=True)["state_dict"]
    loaded = copy.deepcopy(net)
    torch.nn.init.zeros_(next(loaded.parameters()))
    loaded.load_state_dict({name.removeprefix("net."): value for name, value in found.items()})
    return predicted(net, x), predicted(loaded, x)


def torchgeo(given: dict[str, Any], folder: Path) -> Outcome:
    from torchgeo.trainers import ClassificationTask

    model = ClassificationTask(model="resnet18", in_channels=4, num_classes=3)
    batch = {"image": torch.randn(4, 4, 32, 32), "label": torch.tensor([0, 1, 2, 0])}
    loader = torch.utils.data.DataLoader([batch] * STEPS, batch_size=None)
    trainer = fit(model, given, loader, loader, host="lightning.pytorch")
    trainer.save_checkpoint(folder / "model.ckpt")
    loaded = ClassificationTask.load_from_checkpoint(folder / "model.ckpt")
    return model, predicted(model, batch["image"]), predicted(loaded, batch["image"])


def _images(folder: Path, count: int) -> Path:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype="uint8")
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def anomalib(given: dict[str, Any], folder: Path) -> Outcome:
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import Fastflow

    images = _images(folder / "images", 8)
    splits = {"test_split_mode": "none", "val_split_mode": "from_train"}
    data = Folder("noise", normal_dir=images, train_batch_size=4, num_workers=0, **splits)
    model = Fastflow(pre_trained=False, flow_steps=2, evaluator=False, visualizer=False)
    engine = Engine(max_steps=STEPS, default_root_dir=folder, **HERE, logger=False, **given)
    engine.fit(model, datamodule=data)
    engine.trainer.save_checkpoint(folder / "model.ckpt")
    loaded = Fastflow.load_from_checkpoint(folder / "model.ckpt", weights_only=False)
    x = torch.ones(1, 3, 256, 256)
    return model, *(predicted(one, x).anomaly_map for one in (model, loaded))


def pytorch_tabular(given: dict[str, Any], folder: Path) -> Outcome:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(48, 3)).astype("float32"), columns=["a", "b", "y"])
    callbacks = given.pop("callbacks", None)
    trainer = TrainerConfig(
        batch_size=16, max_epochs=1, accelerator="cpu", devices=1, early_stopping=None, checkpoints=None,
        load_best=False, progress_bar="none", trainer_kwargs=given,
    )  # fmt: skip
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["a", "b"], num_workers=0),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-8"),
        optimizer_config=OptimizerConfig(),
        trainer_config=trainer,
        verbose=False,
    )
    model.fit(train=frame, validation=frame, callbacks=callbacks)
    model.save_model(str(folder / "model"))
    both = (model, TabularModel.load_model(str(folder / "model")))
    return model.model, *(one.predict(frame).to_numpy() for one in both)


#: what draws numbers that no seed decides
_AUGMENTS = ("random_flip", "color_jitter", "random_gray_scale", "gaussian_blur", "random_resize", "local_view")
_FIRST_VIEW = {"gaussian_blur": None, "solarize": None}


def lightly_train(given: dict[str, Any], folder: Path) -> Outcome:
    import lightly_train
    from torchvision.models import resnet18

    out = folder / "out"
    lightly_train.pretrain(
        out=out, data=_images(folder / "images", 8), model="torchvision/resnet18", method="dino", batch_size=4,
        transform_args={"image_size": (64, 64), **dict.fromkeys(_AUGMENTS), "global_view_1": _FIRST_VIEW},
        num_workers=0, epochs=2, seed=0, overwrite=True, **HERE, loggers=None, **given,
    )  # fmt: skip
    x, exported = torch.ones(1, 3, 64, 64), out / "exported_models/exported_last.pt"
    net, loaded = resnet18(), resnet18()
    net.load_state_dict(torch.load(exported, weights_only=True))
    loaded.load_state_dict(torch.load(exported, weights_only=True))
    return net, predicted(net, x), predicted(loaded, x)


@dataclass(frozen=True)
class Package:
    """``home`` is imported first, so that a plan meets the copy of Lightning that the package uses.

    ``words``: it takes names of strategies only. ``pins``: what half precision needs.
    """

    run: Callable[[dict[str, Any], Path], Outcome]
    home: str
    words: bool = False
    callbacks: bool = True
    pins: Any = None


PACKAGES = {
    "transformers": Package(transformers, "transformers"), "peft": Package(peft, "peft"),
    "bitsandbytes": Package(bitsandbytes, "bitsandbytes"), "timm": Package(timm, "timm"),
    "lightly": Package(lightly, "lightly"), "monai": Package(monai, "monai"),
    "torchgeo": Package(torchgeo, "torchgeo.trainers"), "chemprop": Package(chemprop, "chemprop"),
    "pytorch-forecasting": Package(pytorch_forecasting, "pytorch_forecasting", pins={"LSTM": "fp32"}),
    "matgl": Package(matgl, "matgl", pins={"LSTM": "fp32"}), "anomalib": Package(anomalib, "anomalib.engine"),
    "gluonts": Package(gluonts, "gluonts.torch"), "scvi-tools": Package(scvi_tools, "scvi"),
    "neuralforecast": Package(neuralforecast, "neuralforecast"),
    "darts": Package(darts, "darts.models", words=True, callbacks=False),
    "pytorch-tabular": Package(pytorch_tabular, "pytorch_tabular", words=True),
    "lightly-train": Package(lightly_train, "lightly_train", words=True, callbacks=False),
}  # fmt: skip


def check(name: str) -> dict[str, str]:
    """Every run of one package; raises AssertionError with what is not so."""
    package = PACKAGES[name]

    # torchvision's wheel is built for CUDA: beside a CPU's torch its operators are missing, and its import fails.
    vision = torch.library.Library("torchvision", "DEF")
    if torch.version.cuda is None:
        for operator in ("nms", "qnms"):
            vision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module(package.home)
    import pytorch_lightning

    from lightning_mp import MixedPrecisionPlan, register_plan
    from lightning_mp.callbacks import PrecisionAudit

    losses: list[float] = []
    for one in ("pytorch_lightning", "lightning.pytorch"):
        if one in sys.modules:
            _record(sys.modules[one].LightningModule, losses)

    def ran(given: dict[str, Any]) -> tuple[list[float], list[Any]]:
        pytorch_lightning.seed_everything(0, verbose=False)
        losses.clear()
        with tempfile.TemporaryDirectory() as folder:
            trained, *predictions = package.run(dict(given), Path(folder))
        before, after = map(torch.as_tensor, predictions)
        assert torch.allclose(before, after, rtol=0, atol=0), "the loaded model predicts otherwise"
        assert losses, "no loss was seen"
        return list(losses), [*(value.detach().clone() for value in trained.state_dict().values()), before]

    def way(mode: str) -> dict[str, Any]:
        plan = MixedPrecisionPlan(mode, pins=None if mode == "32-true" else package.pins)
        if not package.words:
            return {"plugins": [plan]}
        register_plan(mode, plan)
        return {"strategy": f"mp_auto@{mode}"}

    stock, first, second = ran({}), ran(way("32-true")), ran(way("32-true"))
    assert _same(first, stock), f"32-true is not stock's: {first[0]} beside {stock[0]}"
    assert _same(second, first), "another result in the same process"
    with tempfile.TemporaryDirectory() as folder:
        audit = {"callbacks": [PrecisionAudit(run_dir=folder)]} if package.callbacks else {}
        (bf16, _), (_, fp16) = ran({**way("bf16-mixed"), **audit}), ran(way("16-mixed"))
    assert bf16 != first[0], "bf16 did not run"
    apart = max(abs(a - b) / max(abs(b), 1) for a, b in zip(bf16, stock[0], strict=True))
    assert apart <= ROUNDINGS * 2.0**-8, f"bf16 differs by {apart:.1%}"
    pairs = zip(fp16, stock[1], strict=True)
    assert all(bool((a.isfinite() | ~b.isfinite()).all()) for a, b in pairs), "fp16 left weights that are not finite"
    return {"version": importlib.metadata.version(name), "bf16": f"{apart:.2%}"}


def _same(one: tuple[list[float], list[Any]], other: tuple[list[float], list[Any]]) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def _record(cls: Any, losses: list[float]) -> None:
    backward = cls.backward

    def recording(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        losses.append(float(loss.detach()))
        backward(self, loss, *args, **kwargs)

    cls.backward = recording


def in_a_process(name: str) -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks.works_with", "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return json.loads(last) if last.startswith("{") else {"error": done.stderr.strip()[-2000:]}


def main() -> int:
    """Run, print, and write the page where all were run: versions, and how far bf16 was from fp32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=list(PACKAGES))
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    if given.here:
        warnings.simplefilter("ignore")
        print(json.dumps(check(given.packages[0])))
        return 0
    found: dict[str, dict[str, str]] = {}
    for name in given.packages:
        found[name] = in_a_process(name)
        print(f"{name}: {found[name]}", flush=True)
    if any("error" in one for one in found.values()):
        return 1
    if given.packages == list(PACKAGES):
        rows = "; ".join(f"{name} {one['version']} ({one['bf16']})" for name, one in found.items())
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning"))
        said = f"Run on {time.strftime('%Y-%m-%d')} with {versions}. In brackets: bf16 from fp32. {rows}."
        write(DOCS / "reference/works-with.md", "## Versions", "\n".join(textwrap.wrap(said, 120)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
