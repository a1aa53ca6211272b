"""Batch norms on every strategy: with ``sync_batchnorm=True`` they are those of one process with the whole batch."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_mp.compat.lightning import ModelParallelStrategy
from lightning_mp.errors import Faults
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from lightning_mp.plan import for_strategy
from support.cells import WHOLE
from support.comparing import of_training, same
from support.norms import RATE, STEPS, Normed, direct, run, run_on
from support.ranks import Ranks
from support.running import fit
from support.sharded import whole

PINS = {"32-true": None, "bf16-mixed": {"BatchNorm1d": "fp32", "net.5": "fp32"}}
slow = pytest.mark.slow
#: those that synchronize as another one does run at night
SLOW = {"zero1": slow, "zero3": slow, "hsdp": WHOLE, "zero2": WHOLE}
HOSTS = ["ddp", "fsdp2", *(pytest.param(host, marks=marks) for host, marks in SLOW.items())]


@cache
def _alone(mode: str) -> dict[str, Any]:
    return run("single", mode, Normed(), pins=PINS[mode])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("host", "mode"),
    [
        *((host, "bf16-mixed") for host in ("ddp", "fsdp2")),
        ("fsdp1", "32-true"),
        *(pytest.param(host, mode, marks=marks) for host, marks in SLOW.items() for mode in PINS),
        *(pytest.param(host, "32-true", marks=slow) for host in ("ddp", "fsdp2")),
    ],
)
def test_synchronized_batch_norms_are_those_of_the_whole_batch(ranks: Ranks, host: str, mode: str) -> None:
    found = ranks.call(run_on, host, mode, sync_batchnorm=True, pins=PINS[mode])
    alone = _alone(mode)
    for one in found:
        assert same(one["tensors"], alone["tensors"], of_training(mode, RATE, STEPS, summands=64, update=10.0))
        assert one["classes"] >= {"BatchNorm1d", "BatchNorm2d"}
        assert one["hooked"] == alone["hooked"] == STEPS


OTHER_HALF = {"bf16-mixed": "fp16", "16-mixed": "bf16"}


@pytest.mark.gloo
@pytest.mark.parametrize("host", ["ddp", "fsdp2", pytest.param("zero1", marks=slow)])
def test_a_norm_that_is_pinned_to_the_other_half_format_trains_as_on_one_device(ranks: Ranks, host: str) -> None:
    """DDP puts its buffers into one tensor within its forward, where autocast knows one half format."""
    # the statistics are rounded to half precision in every step
    within = of_training("bf16-true", RATE, STEPS, summands=64, update=10.0)
    for mode, half in OTHER_HALF.items():
        pins = {"BatchNorm*": half}
        alone = run("single", mode, Normed(), pins=pins)["tensors"]
        for each in ranks.call(run_on, host, mode, sync_batchnorm=True, pins=pins):
            assert each["tensors"]["net.1.running_mean"].dtype == TORCH_DTYPES[half]
            assert same(each["tensors"], alone, within)


def test_on_one_device_there_is_nothing_to_synchronize() -> None:
    module = Normed()
    fit(module, max_steps=STEPS, strategy="mp_ddp", sync_batchnorm=True)
    assert same(whole(module), _alone("32-true")["tensors"])


class AndReLU(nn.BatchNorm1d):
    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


class Own(TorchSyncBatchNorm):
    """A user's own."""


def _refused(strategy: Any, layer_sync: Any, module: nn.Module) -> str:
    strategy._layer_sync = layer_sync
    strategy.parallel_devices = [torch.device("cpu")]
    faults = Faults()
    for_strategy.synced(strategy, module, faults)
    return "; ".join(f"{fault.problem} {fault.fix}" for fault in faults.found)


def test_what_cannot_be_synchronized_is_refused() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4))
    assert "mp_ddp" in _refused(DDPStrategy(), TorchSyncBatchNorm(), norm)
    assert "'0', a AndReLU" in _refused(ModelParallelStrategy(), TorchSyncBatchNorm(), nn.Sequential(AndReLU(4)))
    assert not _refused(DDPStrategy(), Own(), norm)
    assert not _refused(ModelParallelStrategy(), TorchSyncBatchNorm(), norm)


@pytest.mark.gloo
def test_on_a_cpu_a_synchronized_norm_is_the_norm_of_the_whole_batch(ranks: Ranks) -> None:
    for found in ranks.call(direct, "cpu"):
        for expected, synchronized in found:
            torch.testing.assert_close(synchronized, expected)


@pytest.mark.gloo
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_recomputed_batch_norms_are_counted_once(ranks: Ranks, host: str, sync: bool) -> None:
    options = {"sync_batchnorm": sync, "pins": PINS["bf16-mixed"]}
    once = ranks.call(run_on, host, "bf16-mixed", **options)
    again = ranks.call(run_on, host, "bf16-mixed", **options, checkpointing="net")
    assert same([one["tensors"] for one in again], [one["tensors"] for one in once])
    assert again[0]["tensors"]["net.1.num_batches_tracked"] == STEPS
