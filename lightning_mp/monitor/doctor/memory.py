"""A run whose peak is beyond the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_mp import planner
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.findings import Finding
from lightning_mp.planner.memory import HELD, STRATEGIES, USABLE

_GIB = 2**30


def will_not_fit(case: Case) -> Iterator[Finding]:
    """A peak beyond the device: predicted with a batch; without one, weights and gradients alone."""
    memory, policy = case.device.memory, case.policy
    named = case.strategy is None or isinstance(case.strategy, str)
    if memory is None or policy is None or not named:
        return
    name = str(case.strategy or "auto").removeprefix("mp_")
    devices = [case.argument(key, 1) for key in ("devices", "num_nodes")]
    ranks = devices[0] * devices[1] if all(isinstance(each, int) and each > 0 for each in devices) else 1
    fix = "shard with strategy='mp_fsdp2' on more devices; lightning-mp advise says how many"
    if case.batch is None or not isinstance(case.model, LightningModule):
        kind = STRATEGIES.get(name, STRATEGIES["auto"])
        sizes = HELD.get(policy.precision, HELD["32-true"])[:2]
        parts = zip(("parameters", "gradients"), sizes, (kind.weights, kind.gradients), strict=True)
        count = sum(parameter.numel() for _, _, parameter in case.trained)
        held = {part: 0 if kind.offload else count * size // (ranks if split else 1) for part, size, split in parts}
        peak, why = sum(held.values()), "by the dtypes of the plan, without optimizer state and activations"
    else:
        args = {key: value for key, value in case.trainer.items() if key not in ("strategy", "devices", "precision")}
        run = {"strategy": name, "devices": ranks, "trainer_args": args | {"accelerator": "auto"}}
        found, fix = planner.prediction_and_change(case.model, case.batch, policy, memory * USABLE, **run)
        held, peak, why = found.parts, found.peak_bytes, f"{found.method}, at the peak of the second step"
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
