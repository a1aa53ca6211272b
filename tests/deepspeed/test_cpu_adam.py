"""DeepSpeedCPUAdam, whose native half dies with any copy of it: the real one, which torch compiles on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.whole]

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from functools import partial
from torch.optim import AdamW
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning_mp import PlanError
from support.models import Regression, weights
from support.oracles import plan_for
from support.running import fit

def run(strategy, optimizer):
    module = Regression(partial(optimizer, lr=1e-2, weight_decay=0.0))
    fit(module, plugins=[plan_for("bf16-mixed")], strategy=strategy)
    return weights(module)

ours, torchs = run("mp_deepspeed_zero2_offload", DeepSpeedCPUAdam), run("mp_deepspeed_zero2_offload", AdamW)
assert all((ours[name] - torchs[name]).abs().max() < 1e-4 for name in ours), (ours, torchs)
try:
    run("mp_fsdp2", DeepSpeedCPUAdam)
except PlanError as error:
    print(error)
"""


def test_it_trains_with_offload_and_is_refused_where_weights_are_dtensors() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "DeepSpeedCPUAdam on sharded parameters, which needs whole parameters, or plain tensors" in ended.stdout
