"""Both of Lightning's names: the copy that a program imports is the one that its plan, strategies and callbacks use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import hosted
from support.launching import environment

ROOT = Path(__file__).resolve().parents[2]
LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
COPIES = (LIGHTNING, PYTORCH_LIGHTNING)
FIRST = (LIGHTNING, "ours first")
PLAN = "from lightning_mp import MixedPrecisionPlan"
OURS = f"""{PLAN}, audit, doctor, make_strategy, trainer_kwargs; from lightning_mp.callbacks import *"""
Program = Callable[[str, str], dict[str, Any]]


def printed(*command: str, cwd: Path | None = None) -> str:
    """What a fresh Python printed."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
        cwd=cwd,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Runs ``support.hosted`` under a name and an order of imports, each once."""

    @cache
    def run(copy: str, order: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("program")
        other = None if (copy, order) == FIRST else run(*FIRST)["checkpoint"]
        theirs = f"import {copy} as pl; from {copy}.cli import LightningCLI"
        imports = [OURS, theirs] if order == "ours first" else [theirs, OURS]
        call = f"from support.hosted import main; main(globals(), {str(folder)!r}, {other!r})"
        said = printed("-c", "; ".join([*imports, call]), cwd=folder)
        return {**json.loads(said.splitlines()[-1]), "checkpoint": str(folder / "step.ckpt")}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_program_runs_alike_under_either_name_whichever_it_imports_first(
    copy: str, order: str, program: Program
) -> None:
    ran, first = program(copy, order), program(*FIRST)
    assert ran["copies"] == [copy]
    assert ran["runs"] == first["runs"]
    assert {*hosted.STRATEGIES, *hosted.CALLBACKS, "LightningCLI", "resumed"} == ran["runs"].keys()
    assert ran["runs"]["mp_ddp"] == ran["runs"]["make_strategy('ddp')"]
    assert ran["keys"] == ["MixedPrecisionPlan"]
    assert ran["others"] == first["others"]


@pytest.mark.slow
def test_a_checkpoint_of_one_copy_is_resumed_under_the_other(program: Program) -> None:
    ran = program(PYTORCH_LIGHTNING, "ours first")
    assert ran["of another"] == ran["runs"]["resumed"]


# ---------------------------------------------------------------------- which copy


@pytest.mark.slow
@pytest.mark.parametrize("installed", COPIES)
def test_where_one_copy_is_installed_it_is_that_one(installed: str) -> None:
    missing = "['lightning']" if installed == PYTORCH_LIGHTNING else "['pytorch_lightning', 'lightning_fabric']"
    show = "print(*(base.__module__ for base in type(plan).__mro__ if base.__name__ == 'FSDPPrecision'))"
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}))"  # as if it could not be found
    said = printed("-c", f"{hide}; {PLAN}; plan = MixedPrecisionPlan(); {show}")
    assert said.split() == [f"{installed}.plugins.precision.fsdp"]


# ---------------------------------------------------------------------- both in one process

BOTH = """
import {first} as ours
from lightning_mp import MixedPrecisionPlan, PlanError, audit, doctor, make_strategy
from lightning_mp.callbacks import *
import {second} as pl
from torch.optim import SGD
from torch.nn import Linear
from support.models import batches
import json

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Linear(16, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)

QUIET = dict(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False,
             enable_progress_bar=False, enable_model_summary=False)

def fit(**arguments):
    pl.Trainer(**QUIET, **arguments).fit(Net(), batches())

def plan():
    return MixedPrecisionPlan("bf16-mixed")

ways = {{
    "plugin": lambda: fit(plugins=[plan()]),
    "name": lambda: fit(plugins=[plan()], strategy="mp_ddp"),
    "strategy": lambda: fit(plugins=[plan()], strategy=make_strategy("fsdp2", plan())),
    **{{c.__name__: lambda c=c: fit(callbacks=[c()]) for c in (LossScaleMonitor, PrecisionAudit, TrainingHealth)}},
    "DtypePinning": lambda: fit(callbacks=[DtypePinning({{"net": "fp32"}})]),
    "audit": lambda: audit(Net()),
    "doctor": lambda: doctor(Net()),
}}
said = {{}}
for name, way in ways.items():
    try:
        said[name] = repr(way())
    except PlanError as error:
        said[name] = str(error)
from support.running import fit
from support.models import Regression
module = Regression()
fit(module, plugins=[plan()], strategy="mp_ddp", callbacks=[TrainingHealth(report=False)])
print(json.dumps({{"said": said, "losses": module.losses}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [COPIES, COPIES[::-1]])
def test_with_both_in_one_process_the_trainer_of_the_other_copy_is_refused_with_what_to_write(
    first: str, second: str, tmp_path: Path
) -> None:
    result = json.loads(printed("-c", BOTH.format(first=first, second=second), cwd=tmp_path).splitlines()[-1])
    for way, said in result["said"].items():
        assert f"of {second} where lightning_mp uses {first}" in said, way
        assert f"Write 'import {first} as pl' throughout, or 'import {second}' before every other import." in said, way
    assert len(result["losses"]) == 8  # its own Trainer is served


# ---------------------------------------------------------------------- names before Lightning is imported

DEFERRED = """
import abc, inspect, pickle, sys
from lightning_mp import MixedPrecisionPlan, doctor
from lightning_mp.callbacks import TrainingHealth
assert not any(name in sys.modules for name in ("torch", "lightning", "lightning_mp.precision", "lightning_mp.monitor"))
early = MixedPrecisionPlan
hints = early | None, list[early], MixedPrecisionPlan.__name__, repr(early)
assert "torch" not in sys.modules
class Before(MixedPrecisionPlan, abc.ABC):
    def __init__(self):
        super().__init__("16-mixed")
from lightning_mp import MixedPrecisionPlan
import lightning_mp.precision
assert MixedPrecisionPlan is lightning_mp.precision.MixedPrecisionPlan is not early
plan = early("bf16-mixed")
assert type(plan) is MixedPrecisionPlan
assert early.__name__ == MixedPrecisionPlan.__name__ and early.__qualname__ == MixedPrecisionPlan.__qualname__
assert early.__doc__ == MixedPrecisionPlan.__doc__ and dir(early) == dir(MixedPrecisionPlan)
assert inspect.signature(early) == inspect.signature(MixedPrecisionPlan)
assert isinstance(plan, early) and isinstance(plan, hints[0]) and not isinstance(3, early)
assert issubclass(MixedPrecisionPlan, early) and issubclass(early, early) and not issubclass(int, early)
assert issubclass(Before, MixedPrecisionPlan) and isinstance(Before(), early) and Before().precision == "16-mixed"
assert type(early.preset("fp16")) is type(early.from_config({"precision": "16-mixed"})) is MixedPrecisionPlan
early.added = 1
assert MixedPrecisionPlan.added == 1
del early.added
assert not hasattr(MixedPrecisionPlan, "added")
assert type(pickle.loads(pickle.dumps(plan))) is pickle.loads(pickle.dumps(early)) is MixedPrecisionPlan
from lightning_mp import doctor as real
assert real is not doctor and inspect.isfunction(real)
assert doctor.__name__ == real.__name__ and doctor.__doc__ == real.__doc__ and doctor.__module__ in real.__module__
assert inspect.signature(doctor) == inspect.signature(real) and pickle.loads(pickle.dumps(doctor)) is real
assert type(TrainingHealth()).__name__ == "TrainingHealth"
"""


@pytest.mark.slow
def test_a_name_fetched_before_lightning_stands_for_the_real_one_in_every_way() -> None:
    printed("-c", DEFERRED)


# ---------------------------------------------------------------------- what is loaded


def test_a_plan_loads_what_a_run_needs() -> None:
    show = "import sys; print(*(name for name in sys.modules if name.startswith('lightning_mp.')))"
    loaded = printed("-c", f"{PLAN}; import lightning.pytorch; MixedPrecisionPlan('16-mixed'); {show}").split()
    needless = {"callbacks", "checkpoints", "cli", "demo", "monitor.audit", "monitor.doctor", "monitor.report"}
    needless |= {f"deepspeed_config.{name}" for name in ("merge", "notes", "read", "schema", "write")}
    needless |= {f"strategies.{name}" for name in ("ddp", "factory", "fsdp1", "fsdp2", "deepspeed")}
    assert [name for name in loaded if name.removeprefix("lightning_mp.") in needless] == []
    assert "lightning_mp.precision" in loaded
