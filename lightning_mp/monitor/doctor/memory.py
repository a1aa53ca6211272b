"""A run whose peak is beyond the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_mp import planner
from lightning_mp.compat.lightning import LightningModule, Strategy
from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.findings import Finding
from lightning_mp.planner.memory import HELD, STRATEGIES, USABLE
from lightning_mp.planner.named import degrees, name_of

_GIB = 2**30


def will_not_fit(case: Case) -> Iterator[Finding]:
    """A peak beyond the device: predicted with a batch; without one, weights and gradients alone."""
    memory, policy = case.device.memory, case.policy
    strategy = "auto" if case.strategy is None else case.strategy
    if memory is None or policy is None or not isinstance(strategy, (str, Strategy)):
        return
    devices = [case.argument(key, 1) for key in ("devices", "num_nodes")]
    ranks = devices[0] * devices[1] if all(isinstance(each, int) and each > 0 for each in devices) else 1
    fix = "shard with strategy='mp_fsdp2' on more devices; lightning-mp advise says how many"
    batch = case.rows if case.batch is None else case.batch
    if batch is None or not isinstance(case.model, LightningModule):
        kind, (shards, tensor) = STRATEGIES.get(name_of(strategy), STRATEGIES["auto"]), degrees(strategy, ranks)
        sizes = HELD.get(policy.precision, HELD["32-true"])[:2]
        parts = zip(("parameters", "gradients"), sizes, (kind.weights, kind.gradients), strict=True)
        count = sum(parameter.numel() for _, _, parameter in case.trained)
        own = {part: count * size // tensor // (shards if split else 1) for part, size, split in parts}
        held = dict.fromkeys(own, 0) if kind.offload else own
        peak, why = sum(held.values()), "by the dtypes of the plan, without optimizer state and activations"
    else:
        args = {key: value for key, value in case.trainer.items() if key not in ("strategy", "devices", "precision")}
        run = {"strategy": strategy, "devices": ranks, "trainer_args": args | {"accelerator": "auto"}}
        found, fix = planner.prediction_and_change(case.model, batch, policy, memory * USABLE, **run)
        held, peak, why = found.parts, found.peak_bytes, f"{found.method}, at the peak of two steps"
    if peak <= memory * USABLE:
        return
    listed = ", ".join(f"{part} {_size(size)}" for part, size in held.items() if size)
    yield Finding(
        name="will_not_fit",
        severity="error",
        what=f"{_size(peak)} on {case.device.name}, which has {_size(memory)}",
        why=f"{listed}: {why}",
        fix=fix,
    )


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
