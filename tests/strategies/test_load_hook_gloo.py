"""``on_load_checkpoint`` changes what is loaded, under every strategy as under DDP, from files and from folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from support.comparing import same
from support.models import FEATURES, HIDDEN, Regression
from support.ranks import Ranks
from support.running import fit
from support.saving import SaveAt
from support.sharded import under, whole

pytestmark = pytest.mark.gloo
#: the strategies that write other checkpoints than DDP, and what writes only a part of the weights there
OTHERS = ("fsdp2", "fsdp1", "deepspeed_zero2", "deepspeed_zero3")
HEAD = "net.3.weight"


class Net(Regression):
    def __init__(self, way: str = "", seed: int = 0) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        torch.manual_seed(seed)
        layers = nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        self.net = nn.Sequential(*layers)
        self.way, self.names = way, list[str]()
        self.strict_loading = way != "drops"
        #: by step, the whole weights before it
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weights.append(whole(self))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 7
        state = checkpoint["state_dict"]
        self.names = sorted(state)
        if self.way == "drops":
            del state[HEAD]
        elif self.way == "doubles":
            state[HEAD].mul_(2)
        elif self.way == "replaces":
            checkpoint["state_dict"] = {name: value + 1 for name, value in state.items() if name in self.names}
        elif self.way == "resets":
            checkpoint["optimizer_states"] = []
        elif self.way == "compares shapes":  # as many projects do for a head of another size
            own = self.state_dict()
            for name in state:
                if state[name].shape != own[name].shape:
                    state[name] = own[name]


class Renamed(Net):
    """Loads what ``Net`` saved under other names."""

    def __init__(self, way: str = "", seed: int = 0) -> None:
        super().__init__(way, seed)
        self.body = self.net
        del self.net

    def loss(self, batch: Any) -> Tensor:
        return (self.body(batch[0]).float() - batch[1]).pow(2).mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("net.", "body."): value for name, value in state.items()}


class Adapted(Net):
    """Trains its head, and saves nothing else."""

    def __init__(self, way: str = "", seed: int = 0) -> None:
        super().__init__(way, seed)
        self.strict_loading = way == "strict"
        self.net[0].requires_grad_(False)
        self.net[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: one for name, one in checkpoint["state_dict"].items() if "net.3" in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.names = sorted(checkpoint["state_dict"])


class Looks(Callback):
    """A callback that reads the weights of the checkpoint, as callbacks of averages do."""

    norm = 0.0

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.norm = float(sum(value.float().norm() for value in checkpoint["state_dict"].values()))


def _saved(strategy: str, path: Path, module: Net, **options: Any) -> None:
    plan = MixedPrecisionPlan("32-true")
    fit(module, callbacks=[SaveAt(path, 3)], max_steps=4, **under(strategy, plan, **options))


def _resumed(strategy: str, path: Path, module: Net, **options: Any) -> dict[str, Any]:
    """The weights where the run goes on and after a step, and what the hooks saw; or what was raised."""
    plan, looks = MixedPrecisionPlan("32-true"), Looks()
    try:
        arguments = under(strategy, plan, **options)
        fit(module, ckpt_path=path / "3.ckpt", callbacks=[looks], max_steps=5, **arguments)
    except RuntimeError as error:
        return {"error": str(error)}
    first, second = module.weights
    return {"begins": first, "then": second, "names": module.names, "norm": round(looks.norm, 3)}


WAYS = ("", "drops", "doubles", "replaces", "resets", "compares shapes")


def _all_ways(strategy: str, folder: str) -> dict[str, dict[str, Any]]:
    path = Path(folder) / strategy
    _saved(strategy, path, Net())
    results = {way: _resumed(strategy, path, Net(way, seed=1)) for way in WAYS}
    return results | {"renames": _resumed(strategy, path, Renamed(seed=1))}


def _adapters(strategy: str, folder: str) -> dict[str, dict[str, Any]]:
    path = Path(folder) / f"{strategy} adapters"
    # ZeRO's engine writes the weights, and leaves out frozen ones by an option of the strategy's
    options = {"exclude_frozen_parameters": True} if "zero" in strategy else {}
    _saved(strategy, path, Adapted(), **options)
    return {way: _resumed(strategy, path, Adapted(way, seed=1), **options) for way in ("", "strict")}


@pytest.mark.parametrize("strategy", OTHERS)
def test_what_the_hook_leaves_in_the_checkpoint_is_loaded(ranks: Ranks, folder: Path, strategy: str) -> None:
    stock, sharded = (ranks.call(_all_ways, name, str(folder))[0] for name in ("ddp", strategy))
    for way, expected in stock.items():
        if (strategy, way) in REFUSED:
            assert REFUSED[strategy, way] in sharded[way]["error"]
            continue
        assert same(sharded[way]["begins"], expected["begins"]), way
        assert sharded[way]["names"] == expected["names"], way
        assert sharded[way]["norm"] == expected["norm"], way
        # Under ZeRO a renamed weight has no optimizer state, which one line says.
        if not (way == "renames" and "zero" in strategy):
            assert same(sharded[way]["then"], expected["then"], 1e-6), way
    assert stock["drops"]["begins"][HEAD].equal(Net(seed=1).net[3].weight)
    assert not same(stock["resets"]["then"], stock[""]["then"], 1e-3)


#: where the module's own state dict, which the hook asks for, holds no whole weights
REFUSED = {
    ("deepspeed_zero3", "compares shapes"): "which holds it in partitions: it is empty there",
    ("fsdp1", "compares shapes"): "size mismatch",
}


@pytest.mark.parametrize("strategy", ["ddp", *OTHERS])
def test_a_checkpoint_of_adapters_resumes_where_loading_is_not_strict(
    ranks: Ranks, folder: Path, strategy: str
) -> None:
    for result in ranks.call(_adapters, strategy, str(folder)):
        resumed = result[""]
        assert resumed["names"] == ["net.3.bias", HEAD]
        frozen = Adapted(seed=1).net[0].weight
        assert resumed["begins"]["net.0.weight"].equal(frozen)
        assert not resumed["begins"][HEAD].equal(Adapted(seed=1).net[3].weight)
        assert "net.0.weight" in result["strict"]["error"]
