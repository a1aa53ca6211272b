"""The doctor's case from a config file, and its findings as a person or a machine reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from lightning_mp.errors import Faults, MissingExtraError, PlanError, nearest, one_line
from lightning_mp.findings import Finding
from lightning_mp.numerics import checkpointing, pins
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.preflight.examining import doctor
from lightning_mp.reading import plain_mapping

if TYPE_CHECKING:
    from rich.console import Console

SUBJECT = "doctor"
#: the parts of a training file that a run is examined by; the others (data, callbacks, …) are left alone
_PARTS = ("plan", "model", "strategy", "trainer")
_EXIT = {"info": 0, "warning": 1, "error": 2}
_COLOURS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


def examine(path: str | PathLike[str], overrides: Sequence[str] = ()) -> list[Finding]:
    """What :func:`doctor` finds for the ``plan``, ``model``, ``strategy`` and ``trainer`` of a YAML file.

    ``overrides`` are ``key=value``, dotted (``plan.precision=16-mixed``). ``model`` and, where it is a mapping with a
    ``_target_``, ``strategy`` are built by Hydra; ``plan`` is a mapping of MixedPrecisionPlan's arguments, or one of
    Lightning's own precisions.

    Raises:
        PlanError: no such file, no YAML, no model, a part that cannot be built, a plan that this model refuses; every
            fault at once.
        MissingExtraError: Hydra is not installed.
    """
    parts, faults = _read(path, overrides), Faults(SUBJECT)
    plan = _plan(parts.get("plan"), faults)
    model = _built(parts.get("model"), "model", faults)
    strategy, trainer = parts.get("strategy"), parts.get("trainer") or {}
    if isinstance(strategy, Mapping) and "_target_" in strategy:
        strategy = _built(cast("Any", strategy), "strategy", faults)
    if not isinstance(trainer, Mapping):
        faults.add(
            f"trainer: {trainer!r}", "a mapping of Trainer arguments", "write 'accumulate_grad_batches: 4' below it"
        )
    if isinstance(model, nn.Module) and isinstance(plan, PrecisionPolicy):
        _check(model, plan, faults)
    faults.raise_if_any()
    return doctor(model, plan, strategy, cast("Mapping[str, Any]", trainer))


def _read(path: str | PathLike[str], overrides: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    file = Path(path)
    faults = Faults(SUBJECT)
    if not file.is_file():
        faults.add(f"config {str(file)!r}, which is no file", "a YAML file", "check the path")
    for item in overrides:
        if "=" not in item:
            faults.add(f"override {item!r}", "key=value", f"write '{item}=...', dots between nested keys")
    faults.raise_if_any()
    parts: dict[str, Any] = {}
    try:
        merged: Any = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides)))
        keys = list(merged) if OmegaConf.is_dict(merged) else []
        for key in (key for key in keys if key in _PARTS):
            value = merged[key]  # interpolations may lead into other parts, so each is resolved where it stands
            is_container = OmegaConf.is_config(value)
            parts[key] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if is_container else value
    except Exception as error:  # OmegaConf's and PyYAML's errors share no base class
        faults.add(f"config {str(file)!r}: {_line(error)}", "a YAML mapping", "mend the file")
        faults.raise_if_any()
        raise
    if not parts:
        near = nearest(str(keys[0]), _PARTS) if keys else ""
        fix = f"did you mean {near}?" if near else "write 'plan:' and 'model:'"
        given = f"the keys {', '.join(map(str, keys))}" if keys else "no keys"
        faults.add(f"config {str(file)!r} with {given}", f"the keys {', '.join(_PARTS)}", fix)
        faults.raise_if_any()
    return parts


def _plan(given: Any, faults: Faults) -> Any:
    """The policy that is written, a precision of Lightning's as it is, or ``None``."""
    if not isinstance(given, Mapping):
        return given
    try:
        return PrecisionPolicy.from_dict(plain_mapping(cast("Mapping[str, Any]", given)))
    except PlanError as error:
        faults.extend(error.faults)
    return None


def _built(given: Any, part: str, faults: Faults) -> Any:
    if not isinstance(given, Mapping) or "_target_" not in given:
        fix = f"write '{part}:' and below it '_target_: package.Class'"
        faults.add(f"{part}: {given!r}", "a mapping with a _target_", fix)
        return None
    try:
        from hydra.utils import instantiate
    except ImportError as error:
        raise MissingExtraError("hydra", "hydra", f"building the {part} of a config") from error
    try:
        return instantiate(given, _convert_="all")
    except Exception as error:  # whatever the model's own code raises
        said = f"{part}: {given['_target_']!r}: {_line(error)}"
        faults.add(said, "a part that can be built", "mend it, or its arguments")
    return None


def _check(model: nn.Module, policy: PrecisionPolicy, faults: Faults) -> None:
    """Patterns that match nothing: the run would be refused. What has a code of its own is the doctor's to say."""
    unmatched = Faults(SUBJECT)
    pins.resolve(model, policy.pins, unmatched)
    if policy.checkpointing is not None:
        checkpointing.select(model, policy.checkpointing, unmatched)
    faults.extend(fault for fault in unmatched.found if "tied weights" not in fault.given)


def _line(error: Exception) -> str:
    """An exception's text, in one line; of Hydra's the cause, without the traceback it writes into it."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {one_line(cause)}"


def exit_status(findings: Sequence[Finding]) -> int:
    """0 where nothing or ``info`` was found, 1 with warnings, 2 with errors."""
    return max((_EXIT[finding.severity] for finding in findings), default=0)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON array, an object each."""
    return json.dumps([finding.to_dict() for finding in findings], indent=2, ensure_ascii=False)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings, the gravest first."""
    from rich.padding import Padding
    from rich.text import Text

    for finding in findings:
        where = f"  {finding.where}" if finding.where else ""
        head = Text.assemble(
            (f"{finding.code} {finding.severity}", _COLOURS[finding.severity]), f" {finding.name}{where}"
        )
        console.print(head)
        for label, text in (("what", finding.what), ("why", finding.why), ("do", finding.fix)):
            console.print(Padding(Text.assemble((f"{label}: ", "dim"), text), (0, 0, 0, 2)))
    counts = [f"{sum(f.severity == severity for f in findings)} {severity}" for severity in reversed(_EXIT)]
    console.print(f"{len(findings)} found: {', '.join(counts)}" if findings else "nothing found")
