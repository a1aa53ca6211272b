"""``lightning-mp env``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, to paste into an issue.")] = False,
) -> None:
    """Say what is installed, and what each mode would do here.

    Example: lightning-mp env --json > env.json
    """
    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, version in found["versions"].items():
        typer.echo(f"{name:18} {version}")
    for device in found["devices"]:
        typer.echo(f"\n{device['device']}: {device['name']}")
        for mode, says in device["modes"].items():
            typer.echo(f"  {mode:11} {says}")


def collect() -> dict[str, Any]:
    """The versions of what is installed, and what each mode does on each device; plain values."""
    import platform

    import torch

    from lightning_mp.monitor.run_log import versions

    # torch says in its own for what it was built
    found = {"system": platform.platform(), **versions(), "torch": str(torch.__version__)}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return {"versions": found, "devices": [_on(device) for device in (*devices, torch.device("cpu"))]}


def _on(device: torch.device) -> dict[str, Any]:
    from lightning_mp.numerics.dtypes import describe
    from lightning_mp.policy import PRECISIONS, hardware

    facts = describe(device)
    modes: dict[str, str] = {}
    for mode in PRECISIONS[:-1]:
        refused = hardware.refusal(facts, mode)
        modes[mode] = "runs" if refused is None else f"refused: {refused[2]}"
        if refused is None and mode == "fp8-mixed":
            if find_spec("torchao") is None:
                modes[mode] = "refused: needs torchao, pip install 'lightning-mp[fp8]'"
            elif facts.type == "cpu":
                modes[mode] = "runs, for checking and not for speed"
        if refused is None and mode.startswith("bf16") and facts.bf16 == "emulated":
            modes[mode] = "runs, emulated: right, but no faster than fp32"
    modes["tf32='high'"] = "runs" if facts.tf32 else "changes nothing: the device has no TF32"
    chosen = hardware.choose(facts, hardware.SMALL_MODEL)
    modes["auto"] = f"{chosen.precision} from 100M parameters on: {chosen.reason}"
    return {"device": str(device), "name": facts.name, "modes": modes}
