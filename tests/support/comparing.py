"""Whether two runs brought back the same; how far apart they may be if they add up in another order."""

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_COMPUTED = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


def same(one: Any, other: Any, within: float = 0.0) -> bool:
    """Whether two nested results are equal: tensors of one dtype and numbers ``within``, anything else exactly.

    Tensors may be apart by ``within`` of 1 and of themselves, numbers by ``within`` of themselves.
    """
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], within) for key in one)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b, within) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=within)
    return bool(one == other)


def state_of(module: nn.Module) -> list[Any]:
    """All of a module that looking at it must not change, and the process's generators and default dtype."""
    named = list(module.named_parameters())
    return [
        {name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        [(name, id(parameter), parameter.requires_grad) for name, parameter in named],
        [(name, id(p.grad), p.grad.clone()) for name, p in named if p.grad is not None],
        [(type(m), m.training, len(m._forward_hooks), list(m.__dict__)) for m in module.modules()],
        [list(getattr(module, "losses", ())), random.getstate(), torch.get_rng_state(), torch.get_default_dtype()],
    ]


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def eps(mode: str) -> float:
    """The distance of 1 to the next number in the dtype that ``mode`` computes in."""
    return torch.finfo(_COMPUTED[mode.partition("-")[0]]).eps


def of_sums(summands: int, mode: str = "32-true") -> float:
    """How far apart, of themselves, two orders of one sum may be.

    Each addition rounds by eps / 2 at most, so that a sum of n numbers of one sign is (n - 1) eps / 2 from the exact
    one, in whatever order, and two of them are (n - 1) eps from each other (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2). The norm of gradients and a mean of losses are such sums.
    """
    return summands * eps(mode)


def of_training(mode: str, rate: float, steps: int = 8, summands: int = 16, update: float = 1.0) -> float:
    """How far apart weights of size 1 may be after ``steps`` of one run, where fp32 sums are taken in another order.

    Strategies differ in that order: a unit of its own has the gradients of a residual stream added up elsewhere, a norm
    of shards is a sum of sums, an optimizer's vector operations end where a shard does. All of it is in fp32. So far

    * in fp32 a gradient is off by ``of_sums(summands)``, ``summands`` being those of the longest sum of the model;
    * in half precision it is off by eps(fp32) likewise, until a number that lies between two of the half format falls
      to the other side. It is eps(half) off then, once in the forward pass and once in the backward pass, and with it
      what is added up to a gradient: 2 eps(half). How soon that happens is the machine's affair: with fp16 as AVX2
      rounds it after four steps of a small Llama, with AVX512-FP16 after another number of them. That it happens is
      the format's.

    Call that r. What a gradient is the sum of cancels in part: where half of it remains, it is off by 2 r. Adam's step
    is rate * m / (sqrt(v) + eps); m and sqrt(v) are both off by as much, so it is off by 4 r rate. Where a step is not
    of the rate's size (SGD: rate times gradient), ``update`` is the largest gradient. Steps add up, and each rounds a
    weight of size 1 by eps(fp32).

    A real fault is further off: one rank's gradients halved by a fraction of the rate a step. A norm that runs in half
    precision is off by r everywhere and at every step, which is more, and moves the first loss, which nothing else does
    (:func:`same_runs`).
    """
    off = of_sums(summands) if mode.startswith("32") else 2 * eps(mode)
    return steps * (4 * off * rate * update + eps("32-true"))


def same_runs(one: Mapping[str, Any], other: Mapping[str, Any], within: float) -> bool:
    """Whether two runs are one, :func:`of_training`: the first loss, of equal weights, to the last bit."""
    return one["losses"][:1] == other["losses"][:1] and same(one, other, within)
