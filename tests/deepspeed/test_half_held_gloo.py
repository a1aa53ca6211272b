"""``half_weights=True`` of ZeRO-1 and 2: the host's bytes, and bit for bit the run with fp32 weights."""

import io
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from support.collectives import Moved
from support.comparing import of_sums, same
from support.fsdp2_halves import Many, Text, text
from support.models import same_weights
from support.ranks import Ranks
from support.saving import ResumableBatches, SaveAt
from support.sharded import HOSTS, Ranked, trained

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo


class Held(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.original = {name: one.detach().clone() for name, one in pl_module.named_parameters()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weights = dict(pl_module.named_parameters())
        storages = [one.detach().untyped_storage() for one in weights.values()]
        self.bytes = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        self.halves = sum(one.numel() for one in weights.values() if one.dtype != torch.float32)
        places = {name: one._hp_mapping for name, one in weights.items() if one._hp_mapping is not None}
        self.masters = {
            name: (place.lp_fragment_address.start, place.get_hp_fragment().detach().clone())
            for name, place in places.items()
        }


@dataclass(frozen=True)
class Beside:
    host: str
    mode: str
    module: Any
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    strategy: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> dict[str, Any]:
        return {"half": self._run(half_weights=True), "fp32": self._run()}

    def _run(self, **how: Any) -> dict[str, Any]:
        held, moved, module = Held(), Moved(), self.module()
        data = {"data": text()} if isinstance(module, Text) else {}
        host = HOSTS[self.host](**self.strategy, **how)
        found = trained(self.mode, host, module, callbacks=[held, moved], **data, **self.options)
        kept = {key: getattr(held, key) for key in ("bytes", "halves", "masters", "original")}
        dtypes, noted = {one.dtype for one in module.parameters()}, getattr(module, "noted", None)
        return {**kept, "run": found, "dtypes": dtypes, "noted": noted}


class Compiled(Many):
    def __init__(self) -> None:
        super().__init__()
        for block in self.net[:2]:
            block.compile(backend="aot_eager", dynamic=False)


class Hooked(Many):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_hook(lambda gradient: gradient * 0.5)

    def on_fit_start(self) -> None:
        self.net[0].one.weight.register_hook(lambda gradient: gradient * 0.25)


SMALL_BUCKETS = {"config": {"zero_optimization": {"reduce_bucket_size": 300, "allgather_bucket_size": 300}}}
RUNS = {
    "llama": Beside("zero1", "bf16-mixed", partial(Text, "llama")),
    "gpt2, whose table is tied": Beside("zero2", "bf16-mixed", partial(Text, "gpt2")),
    "fp16 with skips": Beside("zero1", "16-mixed", partial(Many, bad=(2, 5))),
    "recomputed, hooks, small buckets": Beside("zero2", "16-mixed", Hooked, {"checkpointing": "Kinds"}, SMALL_BUCKETS),
    "compiled": Beside("zero1", "bf16-mixed", Compiled),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_the_one_with_fp32_weights(ranks: Ranks, name: str) -> None:
    for found in ranks.run(RUNS[name]):
        half, fp32 = found["half"], found["fp32"]
        assert half["bytes"] - fp32["bytes"] == pytest.approx(-2 * half["halves"], abs=64)  # padding
        for what in ("losses", "weights", "counts", "skipped", "scales", "validated"):
            assert same(half["run"][what], fp32["run"][what]), what
        assert half["dtypes"] == {torch.float32}  # after the run
        assert any((weight != weight.bfloat16()).any() for weight in half["run"]["weights"].values())
        assert not fp32["halves"]
        assert half["masters"]
        for weight, (start, master) in half["masters"].items():
            assert torch.equal(master.view(-1), half["original"][weight].view(-1)[start : start + master.numel()])


def test_the_norm_to_clip_by_is_summed_by_groups(ranks: Ranks) -> None:
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
    for found in ranks.run(Beside("zero2", "16-mixed", partial(Ranked, optimizer="sgd"), clipped)):
        half, fp32 = found["half"]["run"], found["fp32"]["run"]
        assert same(half["norms"], fp32["norms"], of_sums(32))
        assert same(half["weights"], fp32["weights"], of_sums(32))


class Between(Many):
    """Reads and writes weights between steps, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net[2].weight
        self.log("norm", weight.norm())
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)["net.2.weight"]
        copied = deepcopy(self.net)[2].weight
        self.noted["alike"] = torch.equal(loaded, weight) and torch.equal(copied, weight)
        self.noted["dtypes"] = {one.dtype for one in (weight, loaded, copied)}
        weight.data.clamp_(-0.125, 0.125)  # exact in either dtype

    def on_train_end(self) -> None:
        self.noted["norm"] = self.net[2].weight.norm().item()


def test_weights_are_read_rounded_and_written_between_steps(ranks: Ranks) -> None:
    for found in ranks.run(Beside("zero1", "bf16-mixed", Between)):
        half, fp32 = found["half"], found["fp32"]
        assert half["noted"]["alike"]
        assert half["noted"]["dtypes"] == {torch.bfloat16}
        assert half["noted"]["norm"] == pytest.approx(fp32["noted"]["norm"], rel=2**-8)
        assert fp32["run"]["weights"]["net.2.weight"].abs().max() <= 0.125
        # rounded, it is no larger
        assert half["run"]["weights"]["net.2.weight"].abs().max() <= 0.125 * (1 + 2**-9)


def earlier(folder: Path) -> list[Any]:
    def run(half: bool = True, **options: Any) -> Any:
        module, host = Ranked(optimizer="sgd"), HOSTS["zero2"](half_weights=half)
        return trained("16-mixed", host, module, data=ResumableBatches(), **options)["weights"]

    fp32 = run(half=False, callbacks=[SaveAt(folder, 4)])
    resumed = run(ckpt_path=folder / "4.ckpt", callbacks=[SaveAt(folder, 6)])
    return [fp32, resumed, run(ckpt_path=folder / "6.ckpt")]


def test_a_checkpoint_of_fp32_weights_goes_on_with_half_ones_masters_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    for fp32, resumed, again in ranks.call(earlier, tmp_path):
        assert same_weights(resumed, fp32)
        assert same_weights(again, fp32)
