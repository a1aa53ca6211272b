"""Both of Lightning's names: the copy that a program imports is the one that its plan, strategies and callbacks use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cells import WHOLE
from support.launching import environment

ROOT = Path(__file__).resolve().parents[2]
COPIES = ("lightning.pytorch", "pytorch_lightning")


def printed(code: str, cwd: Path | None = None) -> str:
    paths = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=paths, cwd=cwd, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


BOTH = """
import {first} as ours
from lightning_mp import MixedPrecisionPlan, PlanError, audit, doctor
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
@pytest.mark.parametrize(("first", "second"), [COPIES, pytest.param(*COPIES[::-1], marks=WHOLE)])
def test_the_trainer_of_the_other_copy_is_refused(first: str, second: str, tmp_path: Path) -> None:
    result = json.loads(printed(BOTH.format(first=first, second=second), tmp_path).splitlines()[-1])
    for way, said in result["said"].items():
        assert f"of {second} where lightning_mp uses {first}" in said, way
        assert f"Write 'import {first} as pl' throughout, or 'import {second}' before every other import." in said, way
    assert len(result["losses"]) == 8  # its own Trainer is served


@pytest.mark.slow
def test_a_plan_loads_what_a_run_needs_and_torchao_is_left_to_the_run() -> None:
    show, fp8 = "print(*sys.modules)", "MixedPrecisionPlan('fp8-mixed', fp8='tensorwise').describe()"
    rest = f"{fp8}; import lightning_mp.strategies, lightning_mp.callbacks, lightning_mp.preflight.doctor"
    plan = "from lightning_mp import MixedPrecisionPlan; import lightning.pytorch; MixedPrecisionPlan('16-mixed')"
    said = printed(f"import sys; {plan}; {show}; {rest}; {show}")
    loaded, everything = (line.split() for line in said.splitlines()[-2:])
    assert [name for name in everything if name.startswith("torchao")] == []
    needless = {"callbacks", "checkpoints", "cli", "demo", "precision_audit.audit", "preflight.doctor", "record.report"}
    needless |= {"strategies.ddp", "strategies.factory", "strategies.fsdp1", "fsdp2.strategy", "deepspeed.strategy"}
    assert [name for name in loaded if name.removeprefix("lightning_mp.") in needless] == []
    assert "lightning_mp.plan.plan" in loaded
