"""After a run the process is as one that has run nothing, whether the run ended well or in an exception."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cuda_path.fits import Fit
from cuda_path.machine import Machine
from cuda_path.processes import Processes

#: set by Lightning where CUDA devices are counted
LIGHTNINGS = "CUDA_DEVICE_ORDER"
RUNS = {
    "32-true": Fit("32-true"),
    "tf32": Fit("32-true", plan={"tf32": True}),
    "no tf32": Fit("32-true", plan={"tf32": False}),
    "auto": Fit("auto"),
    "bf16-mixed, pins, checkpointing": Fit(plan={"pins": {"norms": "fp32"}, "checkpointing": "Block"}),
    "16-true": Fit("16-true"),
    "fp8-mixed": Fit("fp8-mixed"),
    "EnableTF32": Fit("32-true", stock=True, callback="EnableTF32"),
    "TrainingHealth": Fit(callback="TrainingHealth"),
    "fsdp2": Fit(strategy="fsdp2", ranks=8, plan={"tf32": True}),
    "fsdp1": Fit(strategy="fsdp1", ranks=8),
}


OFTEN = ("tf32", "bf16-mixed, pins, checkpointing", "fsdp2")


def _state() -> dict[str, Any]:
    """Every switch of the process that a plan, or what it uses, could set; what cannot be read says so."""
    import os
    import random

    import numpy
    import torch

    backends, cuda = torch.backends, torch.backends.cuda
    fp32 = {
        "": backends,
        "cuda.matmul": cuda.matmul,
        "cudnn": backends.cudnn,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn": backends.mkldnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn.conv": backends.mkldnn.conv,
        "mkldnn.rnn": backends.mkldnn.rnn,
    }
    functorch: Any = __import__("torch._functorch.config").__dict__["_functorch"].config
    reads = {
        **{f"{name}.fp32_precision": lambda one=one: one.fp32_precision for name, one in fp32.items()},
        "matmul precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
        "fp16 reduction": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduction": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
        "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")],
        "autocast's dtype": lambda: [str(torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")],
        "autocast's cache": torch.is_autocast_cache_enabled,
        "default dtype": lambda: str(torch.get_default_dtype()),
        "default device": lambda: str(torch.get_default_device()),
        "grad": lambda: [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "cudnn": lambda: [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
        "attention": lambda: [cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), backends.mha.get_fastpath_enabled()],
        "backward of compiled": lambda: str(functorch.backward_pass_autocast),
        "environment": lambda: {key: value for key, value in os.environ.items() if key != LIGHTNINGS},
        "folder": os.getcwd,
        "python's generator": lambda: hash(random.getstate()),
        "numpy's generator": lambda: hash(numpy.random.get_state(legacy=True)[1].tobytes()),
        "torch's generator": lambda: hash(torch.get_rng_state().numpy().tobytes()),
        "cudnn.flags()": _enters_flags,  # last: it writes
    }
    return {name: _tried(read) for name, read in reads.items()}


def _tried(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError as error:
        return f"raises {error}"


def _enters_flags() -> str:
    import torch

    with torch.backends.cudnn.flags():
        return "can be entered"


@dataclass(frozen=True)
class Left:
    """The state of a process in which ``fit`` ran, or nothing did."""

    fit: Fit | None = None

    def run(self) -> dict[str, Any]:
        import random

        import torch

        torch.manual_seed(0)
        random.seed(0)  # Python seeds it in each fork
        if self.fit is not None:
            try:
                self.fit.run()
            except KeyError:
                assert self.fit.fails
        drawn = hash(torch.get_rng_state().numpy().tobytes())
        torch.manual_seed(0)  # as a stock run draws
        return {**_state(), "drawn": drawn}


@pytest.mark.parametrize("fails", [False, True], ids=["a success", "an exception"])
@pytest.mark.parametrize("name", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.slow) for one in RUNS])
def test_the_process_is_as_one_that_ran_nothing(name: str, fails: bool, cuda: Processes) -> None:
    fit = replace(RUNS[name], fails=fails)
    before, after = (cuda.run(case, Machine(count=fit.ranks)) for case in (Left(), Left(fit)))
    # on more ranks than one the fakes of collectives draw from Python's generator
    others = {"drawn", *(["python's generator"] if fit.ranks > 1 else [])}
    assert {key: after[key] for key in after.keys() - others} == {key: before[key] for key in before.keys() - others}


def test_as_many_random_numbers_are_drawn_as_by_stock(cuda: Processes) -> None:
    found = [cuda.run(Left(Fit(stock=stock)))["drawn"] for stock in (True, False)]
    assert found[0] == found[1]
