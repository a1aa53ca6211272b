"""What has to be known of an optimizer before it steps: its closure, and what goes wrong with half precision."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_mp.errors import Fault, PlanError, is_number
from lightning_mp.numerics.dtypes import HALF


@cache
def _closure_parameter(kind: type[Optimizer]) -> inspect.Parameter | None:
    return inspect.signature(kind.step).parameters.get("closure")


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Whether the optimizer cannot step without a closure (LBFGS and its kind)."""
    closure = _closure_parameter(type(optimizer))
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may evaluate a closure of its own accord (SAM and its kind); of torch's only LBFGS does."""
    return not type(optimizer).__module__.startswith("torch.optim.") and _closure_parameter(type(optimizer)) is not None


def warnings(optimizer: Optimizer) -> Iterator[str]:
    """What will go wrong with the half-precision parameters of ``optimizer``."""
    name = type(optimizer).__name__
    if loses_updates(optimizer):
        yield (
            f"{name}(fused=True) on the CPU leaves most half-precision parameters as they were (a fault of torch's "
            "kernel): drop fused=True, or store parameters in fp32"
        )
    if eps_is_zero(optimizer):
        yield (
            f"{name}'s eps is 0 in fp16, so its first step divides by zero wherever a gradient is small: set eps=1e-4, "
            "use fused=True, or store parameters in fp32 ('16-mixed')"
        )


def loses_updates(optimizer: Optimizer) -> bool:
    """Whether torch's fused SGD would leave half-precision parameters on the CPU as they were.

    Seen with torch 2.13: of 32 bf16 numbers it updates none, of 100 four. AdamW, Adam and Adagrad are right.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group.get("fused") and parameter.device.type == "cpu" and parameter.dtype in HALF
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def keeps_small_updates(optimizer: Any) -> bool:
    """Whether what half-precision weights cannot hold of an update is not lost.

    It is rounded stochastically (torchao, right on average), or kept in fp32 masters (Apex, Transformer Engine) or a
    compensation of Kahan's (optimi), by the names these optimizers have for it.
    """
    own = getattr(optimizer, "optimizer", optimizer)
    names = ("bf16_stochastic_round", "master_weights", "kahan_sum")
    return any(getattr(own, name, None) or own.defaults.get(name) for name in names)


def eps_is_zero(optimizer: Optimizer) -> bool:
    """Whether an ``eps`` added to fp16 state rounds to 0 (below 2**-25); fused kernels compute in fp32."""
    return any(
        not group.get("fused") and 0 < group["eps"] <= 2.0**-25 and parameter.dtype is torch.float16
        for group in optimizer.param_groups
        if is_number(group.get("eps"))  # Adafactor has two
        for parameter in group["params"]
    )


@contextmanager
def foreign_state_explained(optimizer: Any) -> Generator[None, None, None]:
    """Around a step, which fails where a checkpoint brought the options of an optimizer of another kind.

    Raises:
        PlanError: it failed for that.
    """
    try:
        yield
    except KeyError as error:
        inner = getattr(optimizer, "optimizer", optimizer)
        absent = [key for group in inner.param_groups for key in inner.defaults if key not in group]
        if not absent or error.args[0] not in absent:
            raise
        raise PlanError([of_another_optimizer(type(inner).__name__, absent[0])]) from error


def of_another_optimizer(name: str, key: str) -> Fault:
    """What to say where a checkpoint lacks what an optimizer keeps."""
    return Fault(
        f"{name} with options or state that have no {key!r}, as a checkpoint of another optimizer brings them",
        "the optimizer with which the checkpoint was saved",
        "configure that one, or begin a new run from the checkpoint's weights alone",
    )
