"""A pytest plugin that runs Lightning's own tests under a plan: whatever passes with Lightning's plugins has to pass.

Lightning's tests are no part of this repository. From a checkout of Lightning at the installed release::

    cd pytorch-lightning/tests
    export PYTHONPATH=$PWD:path/to/lightning-mp
    pytest tests_pytorch/{trainer,callbacks,models,loops,core,checkpointing,tuner} -o addopts= -v > stock.txt
    LIGHTNINGS_TESTS=plan pytest -p benchmarks.lightnings_tests ... > plan.txt
    python -m benchmarks.lightnings_tests stock.txt plan.txt

``plan`` puts ``MixedPrecisionPlan(<the flag>)`` where a test gave no plugin; ``ddp`` and ``plan+ddp`` also run what
gave no strategy under DDP, with one process, so that tests may look at what happened in it. The last command lists the
tests that end otherwise.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_mp import MixedPrecisionPlan

_WAYS = os.environ.get("LIGHTNINGS_TESTS", "").split("+")
#: Lightning's plugins for which a plan can stand
_STOCK = (Precision, MixedPrecision, HalfPrecision)


class Connector(accelerator_connector._AcceleratorConnector):
    """Lightning's choice of a strategy and a precision plugin, then the plan's place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        alone = kwargs.get("strategy") == "auto" and kwargs.get("devices") in ("auto", 1)
        if "ddp" in _WAYS and alone and kwargs.get("accelerator") in ("auto", "cpu"):
            kwargs |= {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": 1, "accelerator": "cpu"}
        super().__init__(*args, **kwargs)

    def _check_and_init_precision(self) -> Precision:
        chosen = super()._check_and_init_precision()
        given = self._precision_plugin_flag is not None or type(chosen) not in _STOCK
        return chosen if given or "plan" not in _WAYS else MixedPrecisionPlan(self._precision_flag)


def pytest_configure() -> None:
    """Have every Trainer that is made from now on choose so, in processes that it starts as well."""
    from lightning.pytorch.trainer import trainer

    trainer._AcceleratorConnector = Connector  # type: ignore[attr-defined]


def outcomes(path: str) -> dict[str, str]:
    """How each test ended in a run with ``-v``."""
    lines = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", Path(path).read_text(), re.MULTILINE)
    return dict(lines)


if __name__ == "__main__":
    before, after = map(outcomes, sys.argv[1:3])
    passed = [test for test, word in before.items() if word == "PASSED"]
    print(
        f"{len(before)} tests, {len(passed)} pass before, {sum(after[t] == 'PASSED' for t in after)} after; otherwise:"
    )
    for test in passed:
        if after.get(test) != "PASSED":
            print(after.get(test, "missing"), test)
