"""In a warm step the host reads nothing of the device, and waits for nothing, but what one table has."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from cuda_path.fits import Fit, Fits, Found, watching
from cuda_path.machine import Machine, Processes
from support.cells import pairwise

FLAG = "read lightning_mp/numerics/loss_scale.py:_read"
COUNTS = "read lightning_mp/numerics/loss_scale.py:_counts"
ARRIVED = "event.synchronize lightning_mp/health/measurement.py:_arrived"
GRADS = "lightning_mp/numerics/grads.py"
THERE_AND_BACK = {f"copy to host {GRADS}:unscale_and_check_": 1, f"copy to device {GRADS}:unscale_and_check_": 1}
FSDP2, GRADIENTS = "torch/distributed/fsdp/_fully_shard", 12
SIGTERM = "lightning/pytorch/loops/training_epoch_loop.py:_broadcast_sigterm_tensor"
#: by what a run has: how often the host waits in a warm step, and where
WAITS: dict[str, dict[str, int]] = {
    "AdamW": {FLAG: 1},
    "a step-interval scheduler": {FLAG: 1},
    "nonfinite='raise'": {COUNTS: 1},
    "nonfinite='raise' of a loss that is scaled": {FLAG: 1},
    "NonFiniteGuard": {"read lightning_mp/bad_steps/guard.py:_last_hook": 1},
    # a reading of three steps ago: events here are never done before they are awaited
    "TrainingHealth": {ARRIVED: 1},
    "LossScaleMonitor of a loss that is scaled": {ARRIVED: 1},
    # the optimizer is on the CPU: the scale goes there, the flag comes back and is read, and so is each look or norm
    "offloaded": {FLAG: 1, **THERE_AND_BACK},
    "offloaded, clipped by value": THERE_AND_BACK,
    "offloaded, clipped by norm": {f"copy to device {GRADS}:_norms": 1, f"copy to host {GRADS}:clip_to_": 1},
    "offloaded, TrainingHealth": {f"copy to device {GRADS}:_norms": 4},
    # what torch and Lightning wait for themselves
    "gradients that go to the CPU": {f"event.synchronize {FSDP2}/_fsdp_param_group.py:finalize_backward": GRADIENTS},
    "gradients that are added to those on the CPU": {
        f"copy to host {FSDP2}/_fsdp_collectives.py:foreach_reduce": GRADIENTS
    },
    "units of FSDP1": {"event.synchronize torch/distributed/fsdp/_runtime_utils.py:_unshard": 1},
    "a batch on more ranks than one": {f"copy to device {SIGTERM}": 1, f"read {SIGTERM}": 1},
}
MODES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed")
CLIPS = (None, "norm", "value")
WRAP = {"wrap": "Block"}
HOSTS = {
    "one device": Fit(),
    "fsdp2 1": Fit(strategy="fsdp2", options=WRAP),
    "fsdp2 8": Fit(strategy="fsdp2", ranks=8, options=WRAP),
    "fsdp2 64": Fit(strategy="fsdp2", ranks=64, options=WRAP),
    "fsdp2 offloaded 8": Fit(strategy="fsdp2", ranks=8, options={**WRAP, "cpu_offload": True}),
    "hsdp 8": Fit(strategy="hsdp", ranks=8, options={**WRAP, "device_mesh": (2, 4)}),
    "hsdp 64": Fit(strategy="hsdp", ranks=64, options={**WRAP, "device_mesh": (8, 8)}),
    "fsdp1 8": Fit(strategy="fsdp1", ranks=8),
    "fsdp1 64": Fit(strategy="fsdp1", ranks=64),
}
FEATURES: dict[str, dict[str, Any]] = {
    "fused AdamW": {},
    "AdamW": {"optimizer": "AdamW"},
    "a step-interval scheduler": {"scheduler": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
    "pins": {"plan": {"pins": {"norms": "fp32"}}},
    "checkpointing": {"plan": {"checkpointing": "Block"}},
    "nonfinite='raise'": {"plan": {"nonfinite": "raise"}},
    **{name: {"callback": name} for name in ("TrainingHealth", "LossScaleMonitor", "PrecisionAudit")},
}
#: of which a sample is looked at each time
OFTEN = ("one device", "fsdp2 8", "fsdp2 offloaded 8", "fsdp1 8")
#: what a plan refuses under FSDP1
WHOLE = ("pins",)


class Row(NamedTuple):
    host: str
    mode: str
    clip: str | None
    feature: str

    def fit(self) -> Fit:
        return replace(HOSTS[self.host], precision=self.mode, clip=self.clip, **FEATURES[self.feature])

    def expected(self) -> Counter[str]:
        """The lines of the table that hold for it, together; the flag is read once, whoever asks."""
        fit, batches = self.fit(), 2 if self.feature == "accumulation" else 1
        lines = [self.feature, *([f"{self.feature} of a loss that is scaled"] if self.mode.startswith("16") else [])]
        if "offloaded" in self.host:
            added = ["gradients that are added to those on the CPU"] * (batches - 1)
            clipped = f"offloaded, clipped by {self.clip}"
            lines += ["offloaded", clipped, f"offloaded, {self.feature}", "gradients that go to the CPU", *added]
        lines += ["a batch on more ranks than one"] * batches * (fit.ranks > 1)
        lines += ["units of FSDP1"] * batches * (fit.strategy == "fsdp1")
        found = sum((Counter(WAITS.get(line, {})) for line in lines), Counter[str]())
        found[FLAG] = min(found[FLAG], 1)
        if "offloaded" in self.host:  # the host knows of a skip
            del found[COUNTS]
        return +found


def rows() -> Iterator[Row]:
    for host, mode, clip, feature in product(HOSTS, MODES, CLIPS, FEATURES):
        if "fsdp1" not in host or not (mode == "fp8-mixed" or feature in WHOLE):
            yield Row(host, mode, clip, feature)


def said(row: Row, found: Found) -> list[str]:
    expected, name = row.expected(), " ".join(map(str, row))
    seen = Counter(found.waits)
    faults = [f"{name}: {where}, {count} more" for where, count in (seen - expected).items()]
    faults += [f"{name}: {where}, {count} fewer" for where, count in (expected - seen).items()]
    faults += [f"{name}: read before it had arrived: {where}" for where in found.early]
    return faults + [f"{name}: changed device: {where}" for where in found.moved]


def check(host: str, chosen: Iterable[Row], cuda: Processes) -> None:
    mine = [row for row in chosen if row.host == host]
    found = cuda.run(Fits(tuple(row.fit() for row in mine)), Machine(count=HOSTS[host].ranks))
    assert [fault for row, one in zip(mine, found, strict=True) for fault in said(row, one)] == []


def test_the_host_reads_a_flag_once_a_step(cuda: Processes) -> None:
    features = "AdamW", "accumulation", "nonfinite='raise'", "TrainingHealth"
    rows_of_fp16 = [Row("one device", "16-mixed", "norm", feature) for feature in features]
    check("one device", [*rows_of_fp16, Row("one device", "fp8-mixed", "norm", "TrainingHealth")], cuda)


@pytest.mark.slow
@pytest.mark.parametrize("host", OFTEN)
def test_the_host_waits_where_the_table_says(host: str, cuda: Processes) -> None:
    check(host, pairwise(row for row in rows() if row.host in OFTEN), cuda)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_the_host_waits_where_the_table_says_in_every_cell(host: str, mode: str, cuda: Processes) -> None:
    check(host, [row for row in rows() if row.mode == mode], cuda)


#: callbacks that do what a plan would, beside Lightning's own precision plugin
ACTING = ("EnableTF32", "DtypePinning", "ActivationCheckpointing", "NonFiniteGuard", "TrainingHealth")


def test_callbacks_without_a_plan_wait_where_the_table_says(cuda: Processes) -> None:
    found = cuda.run(Fits(tuple(Fit(stock=True, callback=name) for name in ACTING)))
    expected = {name: WAITS.get(name, {}) for name in ACTING}
    assert {name: one.waits for name, one in zip(ACTING, found, strict=True)} == expected
    assert [one for one in found if one.early or one.moved] == []


def asks(waits: bool) -> tuple[list[str], dict[str, int]]:
    with watching() as watched:
        watched.on = True
        there = torch.ones(4, device="cuda")
        here = there.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if waits:
            event.synchronize()
        here.add(1)
        there.sum().item()
        return watched.early, dict(watched.waits)


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_read_and_what_is_computed_with_before_it_arrived_is_seen(waits: bool, cuda: Processes) -> None:
    early, seen = cuda.call(asks, waits)
    assert len(early) == (not waits)
    assert seen == {"read torch": 1, **({"event.synchronize torch": 1} if waits else {})}
