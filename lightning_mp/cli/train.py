"""``lightning-mp train``: run a YAML file with ``key=value`` changes, or a sweep of several runs."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lightning_mp.cli.output import load_parts, refusals

if TYPE_CHECKING:
    from lightning_mp.cli.parts import Regime
    from lightning_mp.compat.lightning import Trainer
    from lightning_mp.errors import Faults

CONFIG = "config.yaml"
Say = Callable[[str], None]
Arguments = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this at run time, on 3.10 too
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file or experiment=llama_tiny, and what to change: plan=bf16, trainer.max_steps=100, "
        "ckpt_path=runs/x/checkpoints/last.ckpt, run_dir=runs/x.",
        show_default=False,
    ),
]
ConfigDirs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--config-dir", exists=True, help="A folder with groups of your own; may be given several times."),
]


def train(
    context: typer.Context,
    arguments: Arguments = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run every combination of plan=fp32,bf16, one after another.")
    ] = False,
    config_dir: ConfigDirs = None,
    show: Annotated[bool, typer.Option("--show", help="Print the config that would run, and leave.")] = False,
) -> None:
    """Train what a YAML file describes.

    Any LightningModule, under a plan and a strategy; Hydra composes the parts.

    Example: lightning-mp train experiment=llama_tiny plan=bf16 trainer.max_steps=100
    """
    if not arguments and not show:
        typer.echo(context.get_help())
        raise typer.Exit
    with refusals("train"):
        status = run(arguments or [], typer.echo, multirun=multirun, config_dirs=config_dir or [], only_show=show)
    raise typer.Exit(status)


def run(
    arguments: Sequence[str],
    say: Say,
    *,
    multirun: bool = False,
    config_dirs: Sequence[Path] = (),
    only_show: bool = False,
) -> int:
    """Compose ``[CONFIG] key=value …``, check it before a model is built, train, and return the exit status.

    The status is 1 if the run was interrupted, or if a run of a sweep failed; else 0. With
    ``multirun`` each combination trains in a process of its own. With ``only_show`` the configs
    are passed to ``say`` as YAML and nothing is trained.

    Raises:
        PlanError: the config is refused, or the run's folder cannot be written.
    """
    parts = load_parts()
    from lightning_mp.cli.config import composed, sweep
    from lightning_mp.errors import Faults

    faults, home = Faults("train"), Path()
    given, runs = sweep(arguments, faults) if multirun else (arguments, [[]])
    for number, chosen in enumerate(runs):
        with composed([*given, *chosen], "train", faults, config_dirs) as (config, places):
            # a part that prints would spoil the YAML
            with redirect_stdout(sys.stderr) if only_show else nullcontext():
                _check_settings(config, faults)
                regime = faults.unwrap(parts.regime(config, places, faults))
            home = Path(config["run_dir"])
            if only_show:
                say("---\n" * (number > 0) + _as_yaml(config).rstrip())
            elif not chosen:
                return _train(config, regime, say)
    return 0 if only_show else _sweep(given, runs, home, config_dirs, say)


def _check_settings(config: dict[str, Any], faults: Faults) -> None:
    """Add a fault for a seed out of range, and for a local checkpoint that does not exist."""
    from lightning_mp.errors import is_whole

    seed, checkpoint = config.get("seed"), str(config.get("ckpt_path"))
    if seed is not None and not (is_whole(seed) and 0 <= seed < 2**32):
        faults.add(f"seed={seed!r}", allowed="an integer from 0 to 2**32 - 1, or null", fix="write seed=0")
    # a path with a colon is an address (s3://…) or a model of a registry: not checked here
    is_path = checkpoint not in ("None", "last", "hpc", "registry") and ":" not in checkpoint
    if is_path and not Path(checkpoint).exists():
        faults.add(f"ckpt_path={checkpoint}, which does not exist", fix="check the path, or write 'last'")
    home = str((config.get("trainer") or {}).get("default_root_dir") or config["run_dir"])
    if checkpoint == "hpc" and "://" not in home and not any(Path(home).glob("hpc_ckpt_*.ckpt")):
        faults.add(f"ckpt_path=hpc, and no hpc_ckpt_*.ckpt in {home}", fix="write the path of a checkpoint, or 'last'")


def _as_yaml(config: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config)


def _train(config: dict[str, Any], regime: Regime, say: Say) -> int:
    """Train the run, and return 1 if it was interrupted, else 0. Rank 0 writes the config before.

    Raises:
        PlanError: a part cannot be built, Lightning refuses the run, or the folder cannot be written.
    """
    parts = load_parts()
    from lightning_mp.compat.lightning import rank_zero_only
    from lightning_mp.errors import Faults, counted

    faults, folder = Faults("train"), Path(config["run_dir"])
    with parts.running(folder, faults):
        trainer = parts.trainer(regime.trainer, faults)
        show_readings(trainer)
        model, data = parts.parts(config, faults)
        if getattr(rank_zero_only, "rank", 0) == 0:
            _write_config(config, folder, say, faults)
        with warnings.catch_warnings():
            # Lightning makes this call of torch, so the user cannot change it
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            trainer.fit(model, **data, ckpt_path=config.get("ckpt_path"))
    if trainer.is_global_zero:
        page, skipped = folder / "report.html", int(regime.plan.skipped_steps)
        lost = f", {skipped} of them skipped" if skipped else ""
        report = f"; report: {page}" if page.exists() else ""
        say(f"{folder}: {counted(trainer.global_step, 'step')}{lost}{report}")
    return 1 if trainer.interrupted else 0


def show_readings(trainer: Trainer) -> None:
    """Show loss and loss scale in the progress bar, as TrainingHealth last read them.

    This waits for no device, since the values were read before. ``bar.get_metrics`` is replaced.
    Without a progress bar or TrainingHealth nothing changes.
    """
    from lightning_mp.errors import number
    from lightning_mp.health.callback import TrainingHealth
    from lightning_mp.record import metric_names
    from lightning_mp.record.run_log import callbacks_of

    health = next((callback for callback in callbacks_of(trainer) if isinstance(callback, TrainingHealth)), None)
    bar: Any = trainer.progress_bar_callback
    if health is None or bar is None:
        return
    given = bar.get_metrics

    def get_metrics(*arguments: Any) -> dict[str, Any]:
        last = next((row for row in reversed(health.rows) if metric_names.LOSS in row), {})
        names = {"loss": metric_names.LOSS, "scale": metric_names.LOSS_SCALE}
        shown = {short: number(last[name]) for short, name in names.items() if last.get(name) is not None}
        return {**shown, **given(*arguments)}

    bar.get_metrics = get_metrics


def _write_config(config: dict[str, Any], folder: Path, say: Say, faults: Faults) -> None:
    """Write the config into the run's folder as ``config.yaml``.

    A run that resumes from a checkpoint in the same folder writes ``config_2.yaml``, and so on. A
    new run there replaces ``config.yaml`` and says so.

    Raises:
        PlanError: the folder or the file cannot be written.
    """
    names = itertools.chain([CONFIG], (f"config_{number}.yaml" for number in itertools.count(2)))
    name = next(name for name in names if not (folder / name).exists())
    if name != CONFIG and not config.get("ckpt_path"):
        name = CONFIG
        say(f"{folder} holds an earlier run, whose checkpoints stay: run_dir=... gives this one a folder of its own")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(_as_yaml(config), encoding="utf-8")
    except OSError as error:
        faults.add(f"run_dir={folder}: {error}", fix="choose another")
        faults.raise_if_any()


def _sweep(
    given: Sequence[str], runs: Sequence[Sequence[str]], home: Path, config_dirs: Sequence[Path], say: Say
) -> int:
    """Train each run in a process of its own, one after another; return 1 if one failed, else 0.

    A run that fails or runs out of memory leaves the others alone. Runs with metrics are compared
    in ``report.html``.
    """
    from lightning_mp.cli.config import file_name
    from lightning_mp.errors import PlanError
    from lightning_mp.record.report import write_report

    failed, ran = 0, list[Path]()
    train = [sys.executable, "-m", "lightning_mp", "train", *(f"--config-dir={each}" for each in config_dirs), *given]
    for number, chosen in enumerate(runs, 1):
        say(f"[{number}/{len(runs)}] {' '.join(chosen)}")
        folder = home / file_name(",".join(chosen))
        quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
        failed += subprocess.run([*train, *chosen, f"++run_dir='{quoted}'"], check=False).returncode != 0
        ran += [folder] if (folder / "metrics.jsonl").is_file() else []
    try:
        say(f"compared: {write_report(ran, home / 'report.html')}" if ran else "nothing wrote metrics")
    except PlanError as error:
        say(f"not compared: {error}")
    if failed:
        say(f"{failed} of {len(runs)} runs failed")
    return 1 if failed else 0
