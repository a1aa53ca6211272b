"""What ZeRO-1 and 2 hold in half precision beside fp32 masters: bytes, and bit for bit the run with fp32 weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_mp.deepspeed import strategy
from lightning_mp.modules.half_weights import MasteredWeight
from support.collectives import Moved
from support.comparing import of_sums, same
from support.fsdp2_halves import Many, Penalised, Text, text
from support.models import same_weights
from support.ranks import Ranks
from support.saving import ResumableBatches, SaveAt
from support.sharded import HOSTS, Ranked, refused, trained, whole

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo


class Held(Callback):
    """What this rank holds before the first step, and what the weights were before the run."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.original = {name: one.detach().clone() for name, one in pl_module.named_parameters()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weights = dict(pl_module.named_parameters())
        halves = [one for one in weights.values() if isinstance(one, MasteredWeight)]
        storages = [getattr(one, "held", one.detach()).untyped_storage() for one in weights.values()]
        self.bytes = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        self.halves = sum(one.numel() for one in halves)
        places = {name: one._hp_mapping for name, one in weights.items() if one._hp_mapping is not None}
        self.masters = {
            name: (place.lp_fragment_address.start, place.get_hp_fragment().detach().clone())
            for name, place in places.items()
        }


@dataclass(frozen=True)
class Beside:
    """A run, and the same one with fp32 weights."""

    host: str
    mode: str
    module: Any
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> dict[str, Any]:
        half = self._run()
        with mock.patch.object(strategy.half_weights, "survey", return_value=[]):
            return {"half": half, "fp32": self._run()}

    def _run(self) -> dict[str, Any]:
        held, moved, module = Held(), Moved(), self.module()
        data = {"data": text()} if isinstance(module, Text) else {}
        found = trained(self.mode, HOSTS[self.host](), module, callbacks=[held, moved], **data, **self.options)
        kept = {key: getattr(held, key) for key in ("bytes", "halves", "masters", "original")}
        return {**kept, "run": found, "kinds": {type(one) for one in module.parameters()}, "steps": moved.steps}


class Compiled(Many):
    """Its blocks are compiled."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net[:2]:
            block.compile(backend="aot_eager", dynamic=False)


class Hooked(Many):
    """Hooks on gradients of weights, from before the run and from within it."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_hook(lambda gradient: gradient * 0.5)

    def on_fit_start(self) -> None:
        self.net[0].one.weight.register_hook(lambda gradient: gradient * 0.25)


SMALL_BUCKETS = {"config": {"zero_optimization": {"reduce_bucket_size": 300, "allgather_bucket_size": 300}}}
SGD = partial(Ranked, optimizer="sgd")
RUNS = {
    "llama": Beside("zero1", "bf16-mixed", partial(Text, "llama")),
    "gpt2, whose table is tied": Beside("zero2", "bf16-mixed", partial(Text, "gpt2")),
    "ties, a weight used twice, attention": Beside("zero2", "bf16-mixed", Many),
    "fp16 with skips": Beside("zero1", "16-mixed", partial(Many, bad=(2, 5))),
    "accumulated": Beside("zero1", "16-mixed", SGD, {"accumulate_grad_batches": 3}),
    "recomputed": Beside("zero2", "16-mixed", Many, {"checkpointing": "Kinds"}),
    "offloaded": Beside("zero2_offload", "16-mixed", Many),
    "compiled": Beside("zero1", "bf16-mixed", Compiled),
    "hooks on gradients": Beside("zero2", "bf16-mixed", Hooked),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_the_one_with_fp32_weights(ranks: Ranks, name: str) -> None:
    for found in ranks.run(RUNS[name]):
        half, fp32 = found["half"], found["fp32"]
        assert half["bytes"] - fp32["bytes"] == pytest.approx(-2 * half["halves"], abs=64)  # padding
        for what in ("losses", "weights", "counts", "skipped", "scales", "validated"):
            assert same(half["run"][what], fp32["run"][what]), what
        assert half["kinds"] == fp32["kinds"] == {nn.Parameter}
        assert any((weight != weight.bfloat16()).any() for weight in half["run"]["weights"].values())
        assert not fp32["halves"]


def test_masters_are_the_weights_of_before_the_run(ranks: Ranks) -> None:
    for found in ranks.run(RUNS["llama"]):
        masters, original = found["half"]["masters"], found["half"]["original"]
        assert masters
        for name, (start, master) in masters.items():
            assert torch.equal(master.view(-1), original[name].view(-1)[start : start + master.numel()])


def test_bytes_are_the_hosts(ranks: Ranks) -> None:
    """2 bytes an element that autocast alone computes with, 4 another; as many are gathered."""
    for found in ranks.run(RUNS["llama"]):
        half, fp32 = found["half"], found["fp32"]
        assert (half["bytes"], fp32["bytes"]) == (319_360, 572_672)
        assert half["bytes"] == fp32["bytes"] - 2 * half["halves"]
        assert sum(half["steps"][2]["gathered"]) == half["bytes"]
        assert sum(half["steps"][2]["reduced"]) == sum(fp32["steps"][2]["reduced"])


def test_the_norm_to_clip_by_is_summed_by_groups(ranks: Ranks) -> None:
    """One more group of fp32 sums."""
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
    for found in ranks.run(Beside("zero2", "16-mixed", SGD, clipped)):
        half, fp32 = found["half"]["run"], found["fp32"]["run"]
        assert same(half["norms"], fp32["norms"], of_sums(32))
        assert same(half["weights"], fp32["weights"], of_sums(32))


class Logs(Many):
    """Reads a weight between steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", self.net[2].weight.norm())


class Clamps(Many):
    """Writes to one."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[2].weight.data.clamp_(-1, 1)


@dataclass(frozen=True)
class Read:
    """What is said of a weight that is read or written; pinned it may be."""

    def run(self) -> list[str]:
        def one(kind: Any, **options: Any) -> Any:
            return trained("16-mixed", HOSTS["zero1"](), kind(), **options)

        for kind in (Penalised, Logs, Clamps):
            one(kind, pins={"net.2": "fp32"})
        return [refused(partial(one, kind)) for kind in (Penalised, Logs, Clamps)]


def test_who_reads_a_weight_is_told_the_pin(ranks: Ranks) -> None:
    for each in ranks.run(Read()):
        for said in each:
            assert "net.2.weight is fp16 under this strategy" in said
            assert "pins={'net.2': 'fp32'}" in said


class Fails(Many):
    """Ends in the fourth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KeyError("of the user's own")


@dataclass(frozen=True)
class Failed:
    """The module after a run that failed, and another run with it."""

    def run(self) -> dict[str, Any]:
        module = Fails()
        with pytest.raises(KeyError, match="of the user's own"):
            trained("bf16-mixed", HOSTS["zero1"](), module)
        kinds, weights = {type(one) for one in module.parameters()}, whole(module)
        module.on_train_batch_start = lambda *_: None
        return {"kinds": kinds, "weights": weights, "again": trained("bf16-mixed", HOSTS["zero1"](), module)["losses"]}


def test_after_a_failure_the_parameters_are_fp32_ones_of_what_the_rank_has(ranks: Ranks) -> None:
    one, other = ranks.run(Failed())
    assert one["kinds"] == {nn.Parameter}
    assert {weight.dtype for weight in one["weights"].values()} == {torch.float32}
    assert same_weights(one["weights"], other["weights"])
    assert len(one["again"]) > 3


@dataclass(frozen=True)
class Earlier:
    """A run with fp32 weights that saves after step 4, and one with half ones that goes on from there and saves."""

    folder: Path

    def run(self) -> dict[str, Any]:
        def run(**options: Any) -> Any:
            return trained("16-mixed", HOSTS["zero2"](), SGD(), data=ResumableBatches(), **options)

        with mock.patch.object(strategy.half_weights, "survey", return_value=[]):
            fp32 = run(callbacks=[SaveAt(self.folder, 4)])
        saves = SaveAt(self.folder, 6)
        resumed = run(ckpt_path=self.folder / "4.ckpt", callbacks=[saves])
        return {"fp32": fp32, "resumed": resumed, "again": run(ckpt_path=self.folder / "6.ckpt")}


def test_a_checkpoint_of_fp32_weights_goes_on_with_half_ones_and_masters_are_saved(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks.run(Earlier(tmp_path)):
        for run in ("resumed", "again"):
            assert same_weights(found[run]["weights"], found["fp32"]["weights"])
