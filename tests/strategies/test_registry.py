"""The ``mp_*`` names in Lightning's registry: there once a plan or a callback is fetched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_mp.strategies.registry import STRATEGIES

ORDERS = {
    "the plan first": "from lightning_mp import MixedPrecisionPlan; import {copy}; plan = MixedPrecisionPlan()",
    "Lightning first": "import {copy}; from lightning_mp import MixedPrecisionPlan",
    "a callback alone": "import {copy}; from lightning_mp.callbacks import TrainingHealth",
}
LIST = "from {copy}.strategies import StrategyRegistry as r; print(*r.available_strategies())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copy", "order"),
    [
        pytest.param(copy, ORDERS[order], id=f"{copy}, {order}")
        for copy, order in [
            *(("lightning.pytorch", order) for order in ORDERS),
            *(("pytorch_lightning", order) for order in list(ORDERS)[1:]),
        ]
    ],
)
def test_every_name_is_registered(copy: str, order: str) -> None:
    program = f"{order}; {LIST}".format(copy=copy)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert {f"mp_{name}" for name in STRATEGIES} <= set(done.stdout.split())


def test_registering_imports_nothing_by_itself() -> None:
    program = "import lightning_mp, lightning_mp.callbacks, lightning_mp.strategies.registry, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert {"torch", "lightning", "pytorch_lightning", "lightning_fabric"} & set(done.stdout.split()) == set()
