"""To unscale gradients, look at them and clip them takes as many operators for many parameters as for few."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_path.fits import watching
from cuda_path.machine import Processes
from lightning_mp import Pin
from lightning_mp.numerics import grads
from support.pinning import pin

CUDA = torch.device("cuda", 0)


def _unscale(parameters: list[Tensor]) -> None:
    one, flag = torch.ones((), device=CUDA), torch.zeros((), device=CUDA)
    grads.unscale_and_check_(grads.gradients(parameters), one, flag)


def _clip_shards(parameters: list[Tensor]) -> None:
    grads.clip_to_(parameters, 1.0, grads.global_norm(parameters, CUDA))


STEPS: dict[str, Callable[[list[Tensor]], Any]] = {
    "unscale and look": _unscale,
    "clip by norm": lambda parameters: grads.clip_grad_norm_(parameters, 1.0),
    "clip shards by norm": _clip_shards,
    "clip by value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
}
DTYPES = ("float32", "float16", "bfloat16")


def launched(dtype: str, counts: tuple[int, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in STEPS}
    with watching() as watched:
        for count in counts:
            parameters = [torch.ones(8, device=CUDA, dtype=getattr(torch, dtype)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            for name, step in STEPS.items():
                watched.operators.clear()
                watched.on = True
                step(parameters)
                watched.on = False
                found[name].append(sum(n for func, n in watched.operators.items() if not func.startswith("prim")))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_do_not_grow_with_the_number_of_parameters(dtype: str, cuda: Processes) -> None:
    for name, (few, many) in cuda.call(launched, dtype, (3, 300)).items():
        assert many == few > 0, name


def wide_head(dtype: str) -> list[str]:
    """The products of a forward and a backward pass of a Linear pinned so that it sums in fp32."""
    with watching() as watched:
        root = nn.Sequential(nn.Linear(32, 16)).cuda()
        pin(root, [Pin("0", dtype, accumulate="fp32")], device="cuda")
        rows = torch.ones(2, 3, 32, device=CUDA, requires_grad=True)
        watched.on = True
        root(rows).sum().backward()
        return sorted(name for name in watched.operators.elements() if "mm" in name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_wide_head_is_one_product_of_half_operands(dtype: str, cuda: Processes) -> None:
    assert cuda.call(wide_head, dtype) == ["aten.mm.default", "aten.mm.default", "aten.mm.dtype"]
