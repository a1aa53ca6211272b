"""A pytest plugin that runs Lightning's own tests under a plan: whatever passes with Lightning's plugins has to pass.

Lightning's tests are no part of this repository. From a checkout of Lightning at the installed release::

    cd pytorch-lightning/tests
    export PYTHONPATH=$PWD:path/to/lightning-mp
    pytest tests_pytorch/{trainer,callbacks,models,loops,core,checkpointing,tuner} -o addopts= -v > stock.txt
    LIGHTNINGS_TESTS=plan pytest -p benchmarks.lightnings_tests ... > plan.txt
    python -m benchmarks.lightnings_tests stock.txt plan.txt

``plan`` puts ``MixedPrecisionPlan(<the flag>)`` where a test gave no plugin. ``ddp`` and ``plan+ddp`` run what gave no
strategy under Lightning's DDP, in one process, so that tests may look at what happened in it. ``plan+mp_ddp`` runs
that, and ``"ddp"``, ``"ddp_spawn"`` and ``"ddp_fork"`` on a CPU, under ``mp_ddp``. The last command lists the tests
that passed before and do not after, each with its cause where ``CAUSES`` has one; it exits with 1 where one has none.
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_mp import MixedPrecisionPlan
from lightning_mp.strategies.ddp import PlanDDPStrategy

_WAYS = set(os.environ.get("LIGHTNINGS_TESTS", "").split("+"))
#: Lightning's plugins for which a plan can stand
_STOCK = (Precision, MixedPrecision, HalfPrecision)
_STARTS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork"}
_AFTER_FIT = "it steps the optimizer by hand once fit has ended, which a plan refuses"
_BY_HAND = "it calls loss.backward() under DDP, where a plan asks for self.manual_backward(loss)"
_KEY = "it lists a checkpoint's keys, and a plan has one"
#: tests that may end otherwise, and why
CAUSES = {
    "test_step_with_optimizer_closure_with_different_frequencies": "it counts the calls of a mock in torch's place",
    "test__eval_step__flow": _AFTER_FIT,
    "test__training_step__epoch_end__flow_scalar": _AFTER_FIT,
    "test_training_step_no_return_when_even": _AFTER_FIT,
    "test_fetching_dataloader_iter_opt[False]": _BY_HAND,
    "test_stop_iteration_with_dataloader_iter": _BY_HAND,
    "test_training_step_with_dataloader_iter": _BY_HAND,
    "test_load_from_checkpoint_hook_calls": _KEY,
    "test_trainer_model_hook_system_fit": _KEY,
    "test_adding_datamodule_hparams[data1-model1]": "loggers are given the plan, also without hyperparameters",
}


class Connector(accelerator_connector._AcceleratorConnector):
    """Lightning's choice of a strategy and a precision plugin, then the plan's place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, on_cpu = kwargs.get("strategy"), kwargs.get("accelerator") in ("auto", "cpu")
        alone = on_cpu and given == "auto" and kwargs.get("devices") in ("auto", 1)
        if alone and _WAYS & {"ddp", "mp_ddp"}:
            kwargs |= {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": 1, "accelerator": "cpu"}
        if "mp_ddp" in _WAYS and (alone or (on_cpu and given in _STARTS)):
            kwargs["strategy"] = PlanDDPStrategy(start_method=_STARTS.get(given, "popen"))
        super().__init__(*args, **kwargs)

    def _check_and_init_precision(self) -> Precision:
        chosen = super()._check_and_init_precision()
        given = self._precision_plugin_flag is not None or type(chosen) not in _STOCK
        return chosen if given or "plan" not in _WAYS else MixedPrecisionPlan(self._precision_flag)


def pytest_configure() -> None:
    """Have every Trainer that is made from now on choose so, in processes that it starts as well."""
    from lightning.pytorch.trainer import trainer

    trainer._AcceleratorConnector = Connector  # type: ignore[attr-defined]
    # its thread sleeps for five seconds, and each test waits for it
    subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.1,)


def outcomes(path: str) -> dict[str, str]:
    """How each test ended in a run with ``-v``; the last word counts, as a test may pass and end in an error."""
    lines = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", Path(path).read_text(), re.MULTILINE)
    return dict(lines)


def main(before: dict[str, str], after: dict[str, str]) -> int:
    """Print the counts of both runs, and what passed before and does not after; how many of it has no cause."""
    for run in (before, after):
        print(len(run), "tests:", ", ".join(f"{many} {word.lower()}" for word, many in Counter(run.values()).items()))
    worse = {test: after.get(test, "missing") for test, word in before.items() if word == "PASSED" != after.get(test)}
    causes = {test: next((why for name, why in CAUSES.items() if name in test), "") for test in worse}
    for test, word in worse.items():
        print(f"{word} {test}: {causes[test] or 'a difference'}")
    return list(causes.values()).count("")


if __name__ == "__main__":
    sys.exit(min(1, main(*map(outcomes, sys.argv[1:3]))))
