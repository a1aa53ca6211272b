"""After a run the process is as one that has run nothing, whether the run ended well or in an exception."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
import torch._functorch.config

from cuda_path.fits import Fit
from cuda_path.machine import Machine, Processes
from support.cells import WHOLE
from support.tf32 import readings

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


def _cells() -> Iterator[Any]:
    """What a run sets it takes back in one place, whether it failed or not: few are seen to fail each time."""
    for name, fails in product(RUNS, (False, True)):
        marks = [] if name in OFTEN else WHOLE if fails else [pytest.mark.slow]
        yield pytest.param(name, fails, marks=marks, id=f"{name}-{'an exception' if fails else 'a success'}")


def _state() -> dict[str, Any]:
    backends, cuda, functorch = torch.backends, torch.backends.cuda, torch._functorch.config
    kinds = ("cuda", "cpu")
    return {
        **readings(),
        "reductions": [
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "default": [torch.get_default_dtype(), torch.get_default_device()],
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn's flags": [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
        "attention": [cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), backends.mha.get_fastpath_enabled()],
        "backward of compiled": str(functorch.backward_pass_autocast),
        "environment": {key: value for key, value in os.environ.items() if key != LIGHTNINGS},
        "folder": Path.cwd(),
        "python's generator": hash(random.getstate()),
        "numpy's generator": crc32(numpy.random.get_state(legacy=True)[1].tobytes()),
        "torch's generator": crc32(torch.get_rng_state().numpy().tobytes()),
    }


@dataclass(frozen=True)
class Left:
    fit: Fit | None = None

    def run(self) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)  # Python seeds it in each fork
        if self.fit is not None:
            try:
                self.fit.run()
            except KeyError:
                assert self.fit.fails
        drawn = crc32(torch.get_rng_state().numpy().tobytes())
        torch.manual_seed(0)  # as a stock run draws
        return {**_state(), "drawn": drawn}


@pytest.mark.parametrize(("name", "fails"), [*_cells()])
def test_the_process_is_as_one_that_ran_nothing(name: str, fails: bool, cuda: Processes) -> None:
    fit = replace(RUNS[name], fails=fails)
    before, after = (cuda.run(case, Machine(count=fit.ranks)) for case in (Left(), Left(fit)))
    # on more ranks than one the fakes of collectives draw from Python's generator
    others = {"drawn", *(["python's generator"] if fit.ranks > 1 else [])}
    assert {key: after[key] for key in after.keys() - others} == {key: before[key] for key in before.keys() - others}


def test_as_many_random_numbers_are_drawn_as_by_stock(cuda: Processes) -> None:
    found = [cuda.run(Left(Fit(stock=stock)))["drawn"] for stock in (True, False)]
    assert found[0] == found[1]
