"""A DeepSpeed JSON that contradicts the plan or the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lightning_mp.compat.lightning import DeepSpeedStrategy
from lightning_mp.deepspeed_config.merge import add_trainer, compose
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.monitor.doctor.case import HALF, Case
from lightning_mp.monitor.findings import Finding

_STEPS = "gradient_accumulation_steps"
_BLOCK = ".enabled="


@dataclass(frozen=True, slots=True)
class Json:
    """What the user wrote for DeepSpeed, and the strategy it was written for."""

    config: Mapping[str, Any]
    stage: int
    #: Lightning's own strategy, which lets the JSON win where it does not refuse it
    stock: bool
    offload_optimizer: bool = False
    offload_parameters: bool = False


def contradicts_trainer(case: Case) -> Iterator[Finding]:
    """Every key of the JSON that contradicts plan or Trainer, with both values."""
    json = _json(case.strategy)
    if json is None:
        return
    faults = _faults(lambda case: _against_plan(json, case), case)
    if case.trainer:
        faults += [fault for fault in _faults(_with_trainer(json), case) if fault not in faults]
    for fault in faults:
        # Lightning adds the block of its own precision beside the other, and DeepSpeed takes no two
        two = case.mixed or case.storage in HALF
        refused = not json.stock or case.policy is not None or _STEPS in fault.given or (_BLOCK in fault.given and two)
        yield Finding(
            name="deepspeed_contradicts_trainer",
            severity="error" if refused else "warning",
            what=fault.given,
            why="the run is refused before its first step" if refused else "DeepSpeed silently uses that of the JSON",
            fix=fault.fix,
            where=fault.given.partition("=")[0],
        )


def _against_plan(json: Json, case: Case) -> None:
    """Raise what the JSON says otherwise than the plan does, or a precision of Lightning's."""
    if case.policy is not None:
        offloads = {"offload_optimizer": json.offload_optimizer, "offload_parameters": json.offload_parameters}
        compose(case.policy, json.config, stage=json.stage, **offloads)
        return
    with Faults() as faults:
        for block in HALF:
            half = case.precision.startswith(block.removeprefix("fp"))
            if not half and (json.config.get(block) or {}).get("enabled") is True:
                given = f"{block}{_BLOCK}True in the JSON and precision={case.precision!r} in the Trainer"
                faults.add(given, "the same in both", f"set {block}.enabled to false, or train in it")


def _faults(check: Any, given: Any) -> list[Fault]:
    try:
        check(given)
    except PlanError as error:
        return list(error.faults)
    return []


def _with_trainer(json: Json) -> Any:
    def check(case: Case) -> None:
        devices, nodes = case.argument("devices", "auto"), case.argument("num_nodes", 1)
        world = devices * nodes if isinstance(devices, int) and devices > 0 else None
        # without a known number of devices nothing can be said of the whole batch
        config = {key: value for key, value in json.config.items() if world is not None or key != "train_batch_size"}
        by_norm = case.argument("gradient_clip_algorithm", "norm") == "norm"
        accumulate = int(case.argument("accumulate_grad_batches", 1))
        add_trainer(
            config,
            clip_norm=case.argument("gradient_clip_val") if by_norm else None,
            accumulate=accumulate,
            world_size=world or 1,
            micro_batch=None,
        )
        if json.stock and _STEPS in config:
            given = f"{_STEPS}={config[_STEPS]!r} in the JSON and Trainer(accumulate_grad_batches={accumulate})"
            fix = f"remove {_STEPS} from the JSON: Lightning's DeepSpeedStrategy takes the Trainer's alone"
            raise PlanError([Fault(given, "the Trainer's alone", fix)])

    return check


def _json(strategy: Any) -> Json | None:
    """The JSON behind a strategy, or that ``strategy`` is itself."""
    if isinstance(strategy, Mapping):
        config = cast("Mapping[str, Any]", strategy)
        zero = config.get("zero_optimization") or {}
        return Json(config, stage=int(zero.get("stage") or 1), stock=False)
    if not isinstance(strategy, DeepSpeedStrategy):
        return None
    own = cast("Any", strategy)
    if hasattr(strategy, "plan_engine"):
        optimizer, parameters = own._offloads
        return Json(own._given or {}, own._stage, False, offload_optimizer=optimizer, offload_parameters=parameters)
    config = own.config if isinstance(own.config, Mapping) else {}
    zero = config.get("zero_optimization") or {}
    return Json(config, stage=int(zero.get("stage") or 1), stock=True)
