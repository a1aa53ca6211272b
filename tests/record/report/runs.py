"""Run folders as the package's own writers leave them, small and the same every time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mp.record.events import Event
from lightning_mp.record.run_folder import RunFolder

SPIKE, COLLAPSE = 12, 20
OVERFLOWS = (1, 2, 9)
#: the charts of a run, and what is drawn in each of them
LINES = {
    "Loss": {"training": "train/loss", "validation": "val/loss"},
    "Gradient norm": {"all parameters": "health/grad_norm"},
    "Parameter norm": {"all parameters": "health/param_norm"},
    "Update-to-weight ratio": {"all parameters": "health/update_ratio"},
    "Loss scale": {"loss scale": "health/loss_scale"},
    "Skipped steps": {"in total": "health/skipped_steps"},
    "Learning rate": {"learning rate": "health/lr"},
    "Tokens per second": {"tokens": "health/tokens_per_s"},
    "Samples per second": {"samples": "health/samples_per_s"},
    "Model FLOPs utilisation": {"MFU": "health/mfu"},
    "Memory": {"peak": "health/memory_peak_gib", "allocated": "health/memory_allocated_gib"},
}


def reading(step: int, shift: float = 0.0) -> dict[str, Any]:
    over = step in OVERFLOWS
    skipped = sum(other <= step for other in OVERFLOWS)
    loss = 7 / math.sqrt(step) + shift
    return {
        "train/loss": math.nan if over else loss,
        "health/grad_norm": math.inf if over else 1.0 + step % 3 + (100.0 if step == SPIKE else 0.0),
        "health/param_norm": 40 + 0.1 * step,
        "health/update_ratio": 0.0 if over else 1e-3 * (1 + step % 5),
        "health/loss_scale": 2.0 ** (20 - skipped),
        "health/skipped_steps": skipped,
        "health/lr": 1e-3 / step,
        "health/tokens_per_s": 1000.0 + step % 7,
        "health/samples_per_s": 10.0 + step % 7,
        "health/mfu": 0.31,
        "health/memory_peak_gib": 2.5,
        "health/memory_allocated_gib": 1.25,
    }


def about(**changes: Any) -> dict[str, Any]:
    return {
        "status": "finished",
        "error": None,
        "at": "2026-01-02T03:04:05+00:00",
        "machine": {"device": "NVIDIA H200", "type": "cuda", "memory_bytes": 141 * 2**30, "processes": 2},
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "strategy": "DDPStrategy",
        "precision": "16-mixed",
        "plan": {"precision": "16-mixed", "pins": {"*norm*": "fp32"}},
        "trainer": {"max_steps": 30},
        **changes,
    }


def audit(module: str = "net.0") -> dict[str, Any]:
    seen = dict.fromkeys(("param", "input", "output", "compute", "grad", "reduce", "optimizer_state"), "float32")
    right = {"module": "net.1", "declared": "fp32", **seen, "ok": True}
    return {"ok": False, "rows": [right, {**right, "module": module, "compute": "float16", "ok": False}]}


def alerts(module: str = "net.3") -> list[Event]:
    return [
        Event(step=SPIKE, kind="grad_norm_spike", severity="warning", rank=1, module=module, evidence={"ratio": 101.5}),
        Event(
            step=COLLAPSE,
            kind="scale_collapse",
            severity="error",
            parameter="weight",
            evidence={"scale": 1.0},
            cause="activations overflow",
            advice="pin the module",
            action="stop",
        ),
    ]


def write_run(path: Path, *, steps: int = 30, shift: float = 0.0, module: str = "net.3", **changes: Any) -> Path:
    """A whole run; ``changes`` are to ``run.json``."""
    owner = object()
    folder = RunFolder.open(path, writer="test", owner=owner)
    for step in range(1, steps + 1):
        folder.metrics(step, reading(step, shift))
        if step % 10 == 0:
            folder.metrics(step, {"val/loss": 3.0 + shift - step / 100})
    for step in OVERFLOWS:
        folder.event(Event(step=step, kind="nonfinite_grad", severity="info", evidence={"scale": 2.0**20}))
    for event in alerts(module):
        folder.event(event)
    folder.write("run.json", about(**changes))
    folder.write("audit.json", audit(module))
    folder.close("test")
    return path


def metrics(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def values(path: Path, name: str) -> list[float | None]:
    return [row[name] for row in metrics(path) if name in row]
