"""``lightning-mp doctor``, ``audit``, ``pins``, ``diff`` and ``env``: examine a config's run, or the machine."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_mp.cli.output import Json, console, load_parts, progress, refusals
from lightning_mp.cli.train import Arguments, ConfigDirs
from lightning_mp.errors import Faults, counted, install_line

if TYPE_CHECKING:
    import torch

    from lightning_mp.precision_audit.audit import AuditReport
    from lightning_mp.record.findings import Finding


def doctor(
    arguments: Arguments = None,
    config_dir: ConfigDirs = None,
    gpu: Annotated[
        str, typer.Option(help="The GPU it will run on, such as t4-16 or a100-80; else this machine's.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say what will go wrong in a run, before it does.

    Exit status 1 with warnings, 2 with errors.

    Example: lightning-mp doctor experiment=llama_tiny plan=fp16
    """
    from lightning_mp.record.findings import exit_status, show, to_json

    progress("examining ...")
    # the model's own prints are no part of the answer
    with refusals("doctor"), redirect_stdout(sys.stderr):
        findings = _examine(arguments or [], config_dir or [], gpu)
    if as_json:
        typer.echo(to_json(findings))
    else:
        from lightning_mp.preflight.doctor import CHECKS

        show(findings, console(), len(CHECKS))
    raise typer.Exit(exit_status(findings))


def _examine(arguments: Sequence[str], config_dirs: Sequence[Path], gpu: str) -> list[Finding]:
    """Return the findings of :func:`lightning_mp.doctor`. The model may be any ``torch.nn.Module``.

    Without a plan, Lightning's own ``trainer.precision`` is examined.

    Raises:
        PlanError: the config, or the name of the GPU, is refused.
    """
    parts = load_parts()
    from lightning_mp.cli.config import composed
    from lightning_mp.policy.hardware import find
    from lightning_mp.preflight.doctor import doctor as examine

    faults = Faults("doctor")
    chosen = find(gpu, faults) if gpu else None
    with composed(arguments, "doctor", faults, config_dirs, needed=["model"], callbacks=None) as (config, places):
        regime = parts.regime(config, places, faults)
        faults.raise_if_any()
        model, plan, given = parts.instantiated(config["model"], "model", faults), None, config.get("strategy") or {}
        if regime is None:
            trainer = parts.trainer_arguments(config, faults)
            strategy = parts.instantiated(given, "strategy", faults) if "_target_" in given else None
        else:
            plan, trainer = regime
            strategy = trainer["strategy"]
        faults.raise_if_any()
        return examine(model, plan, strategy, trainer, device=None if chosen is None else chosen.device)


# ---------------------------------------------------------------------- audit


def audit(
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option("--steps", help="How many optimizer steps are audited.")] = 1,
    as_json: Json = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Show which dtypes each module of a run really ran in.

    Trains the first steps of what `train` would run, and compares dtypes with those declared. Exit status 0 if all
    are as declared, 1 if a module's are not, 2 for bad input.

    Example: lightning-mp audit experiment=llama_tiny plan=fp16
    """
    progress(f"auditing {counted(steps, 'step')} ...")
    with refusals("audit"), redirect_stdout(sys.stderr) if as_json else nullcontext():
        report, folder = _audited(arguments or [], steps, config_dir or [])
    if as_json:
        typer.echo((folder / "audit.json").read_text(encoding="utf-8").rstrip())
    else:
        typer.echo(report.to_text(console().width))
        if not report.ok:
            typer.echo(report.explanation())
    typer.echo(f"written: {folder / 'audit.md'}, {folder / 'audit.json'}", err=as_json)
    raise typer.Exit(0 if report.ok else 1)


def _audited(arguments: Sequence[str], steps: int, config_dirs: Sequence[Path]) -> tuple[AuditReport, Path]:
    """Train ``steps`` optimizer steps, and return the audit and the run's folder.

    The config's callbacks do not run. Nothing is validated, logged or saved as a checkpoint.

    Raises:
        PlanError: the config is refused, or the run made no step.
    """
    parts = load_parts()
    from lightning_mp.plan.side_run import BARE
    from lightning_mp.precision_audit.audit import PrecisionAudit

    faults = Faults("audit")
    faults.whole("--steps", steps, 1, "leave it out to audit the first step")
    with parts.one_run(arguments, faults, "audit", config_dirs) as (config, regime):
        warnings.filterwarnings("ignore", message="PrecisionAudit: ")  # the report says it
        folder = Path(config["run_dir"])
        callback = PrecisionAudit(steps, run_dir=folder)
        alone = {**BARE, "callbacks": [callback], "max_steps": steps, "logger": False}
        trainer = parts.trainer({**regime.trainer, **alone}, faults)
        model, data = parts.parts(config, faults)
        trainer.fit(model, **data)
    if callback.report is None:
        faults.add("the run made no step", fix="look at the data section")
    return faults.unwrap(callback.report), folder


# ---------------------------------------------------------------------- pins


def pins(
    arguments: Arguments = None,
    steps: Annotated[int, typer.Option("--steps", help="How many batches are used.")] = 8,
    confirm: Annotated[bool, typer.Option("--confirm", help="Train with and without what is suggested.")] = False,
    as_json: Json = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Compare the gradients of what `train` would run with those in fp32, and show the fewest pins that close the gap.

    Under FP8 also the layers to leave out of it.

    Example: lightning-mp pins experiment=llama_tiny plan=bf16
    """
    with refusals("pins"):
        parts = load_parts()
        from lightning_mp.pin_advice import suggest_pins

        faults = Faults("pins")
        with parts.one_run(arguments or [], faults, "pins", config_dir or []) as (config, regime):
            model, batches = parts.model_and_batches(config, faults)
            advice = suggest_pins(model, batches, regime.plan, steps=steps, confirm=confirm)
    typer.echo(json.dumps(advice.to_dict(), indent=2) if as_json else str(advice))


# ---------------------------------------------------------------------- diff


def diff(
    arguments: Arguments = None,
    plans: Annotated[str, typer.Option(help="Two words or YAML files, or one with --compile.")] = "fp32,bf16-mixed",
    compile: Annotated[str, typer.Option(help="Run the second by torch.compile with this backend: aot_eager.")] = "",
    as_json: Json = False,
    config_dir: ConfigDirs = None,
) -> None:
    """Find the first module that computes something else under another plan, or compiled.

    Each module gets the same inputs under both; a difference counts where it is more than the format explains.

    Example: lightning-mp diff experiment=llama_tiny --plans bf16-mixed --compile aot_eager
    """
    with refusals("diff"):
        parts = load_parts()
        from lightning_mp.comparison.compare import read_plans
        from lightning_mp.differences import first_difference
        from lightning_mp.plan.plan import MixedPrecisionPlan

        faults = Faults("diff")
        policies = read_plans(f"{plans},{plans}" if compile and "," not in plans else plans, faults)
        if len(policies) > 2:
            faults.add(f"{len(policies)} plans", fix="write two")
        # a section may refer to the plan, as ${plan.precision}: give it a valid one
        replaced: dict[str, Any] = {"plan": {"precision": "bf16-mixed"}, "callbacks": None}
        with parts.one_run(arguments or [], faults, "diff", config_dir or [], **replaced) as (config, _):
            model, batches = parts.model_and_batches(config, faults)
            a, b = map(MixedPrecisionPlan.from_policy, policies.values())
            difference = first_difference(model, next(iter(batches)), a, b, compile=compile)
    typer.echo(json.dumps(difference.to_dict(), indent=2) if as_json else str(difference))


# ---------------------------------------------------------------------- env


def env(as_json: Json = False) -> None:
    """Say what is installed, and what each mode would do here.

    Example: lightning-mp env --json > env.json
    """
    from lightning_mp.record.run_log import PACKAGES

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        typer.echo(f"{name:18} {version}")
    for name in PACKAGES:
        if name not in facts["versions"]:
            typer.echo(f"{name:18} not installed")
    for device in facts["devices"]:
        typer.echo(f"\n{device['device']}: {device['name']}")
        for mode, says in device["modes"].items():
            typer.echo(f"  {mode:11} {says}")


def collect() -> dict[str, Any]:
    """Return installed versions, and the effect of each mode on each device, as plain values."""
    import platform

    import torch

    from lightning_mp.record.run_log import versions

    # torch's own version has its build in it, such as +cu124
    installed = {"system": platform.platform(), **versions(), "torch": str(torch.__version__)}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return {"versions": installed, "devices": [_on(device) for device in (*devices, torch.device("cpu"))]}


def _on(device: torch.device) -> dict[str, Any]:
    """Return the name of a device, and for each mode whether it runs there or why it is refused."""
    from lightning_mp.numerics.dtypes import describe
    from lightning_mp.policy import PRECISIONS, hardware

    facts = describe(device)
    modes: dict[str, str] = {}
    for mode in PRECISIONS[:-1]:
        refused = hardware.refusal(facts, mode)
        modes[mode] = "runs" if refused is None else f"refused: {refused[2]}"
        if refused is None and mode == "fp8-mixed":
            if find_spec("torchao") is None:
                modes[mode] = f"refused: needs torchao, {install_line('torchao', 'fp8')}"
            elif facts.type == "cpu":
                modes[mode] = "runs, for checking and not for speed"
        if refused is None and mode.startswith("bf16") and facts.bf16 == "emulated":
            modes[mode] = "runs, emulated: right, but no faster than fp32"
    modes["tf32='high'"] = "runs" if facts.tf32 else "changes nothing: the device has no TF32"
    chosen = hardware.choose(facts, hardware.SMALL_MODEL)
    modes["auto"] = f"{chosen.precision} from 100M parameters on: {chosen.reason}"
    return {"device": str(device), "name": facts.name, "modes": modes}
