"""What a plan has to know of an optimizer: its closure, whether it can step on shards, what half precision costs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat.lightning import rank_zero_warn
from lightning_mp.errors import Faults, PlanError, is_number
from lightning_mp.numerics import grads
from lightning_mp.numerics.grads import local

# ------------------------------------------------------------------ closures


_SAM = frozenset(("ASAM", "ESAM", "GSAM", "LookSAM", "SAM", "Sam", "WSAM"))


#: modules of steps that need no closure, and do nothing with one but call it first
_PLAIN = ("torch.optim.", "torchao.", "lightning.pytorch.", "pytorch_lightning.")


@cache
def takes_closure(kind: type[Optimizer]) -> bool:
    """Whether optimizers of this class are given a closure: all but torch's own, of which LBFGS alone needs one.

    A step that hands on what it is given (``*args, **kwargs``) is given one, as by Lightning. Lightning's own optimizer
    stands where ``configure_optimizers`` returns None.
    """
    takes = inspect.signature(kind.step).parameters
    closure = takes.get("closure")
    if closure is None:
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    return closure.default is closure.empty or not kind.step.__module__.startswith(_PLAIN)


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer cannot step without a closure (LBFGS and its kind)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def is_known_to_evaluate_again(optimizer: Optimizer) -> bool:
    """Whether it is LBFGS, an optimizer of its kind, or by its name one of SAM's."""
    return requires_closure(optimizer) or not _SAM.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__)


def sample(optimizer: Optimizer) -> list[Tensor]:
    """Copies of some numbers of two parameters, which tell whether an optimizer has moved its weights."""
    trained = [local(parameter).detach() for parameter in grads.parameters_of(optimizer) if parameter.requires_grad]
    return [parameter.reshape(-1)[:1024].clone() for parameter in (*trained[:1], *trained[-1:])]


def refuse_moved(optimizer: Optimizer, before: list[Tensor]) -> None:
    """Refuse to leave out a step of an optimizer that has moved its weights since ``before``, its :func:`sample`.

    Raises:
        PlanError: it has: schedule-free methods, and those that perturb weights first.
    """
    pairs = zip(before, sample(optimizer), strict=True)
    if not all(torch.allclose(old, new, rtol=0, atol=0, equal_nan=True) for old, new in pairs):
        name = type(optimizer).__name__
        raise PlanError.of(
            f"{name}, which moves weights before it evaluates its closure, in a step that has to be left out, "
            "as its gradients are missing or not finite",
            "use nonfinite='ignore' under a precision without loss scaling, or an optimizer such as AdamW",
        )


# ------------------------------------------------------------------ shards

#: what an optimizer is given to step: FSDP2's DTensors, pieces of flattened tensors, the parameters of one stage
Shards = Literal["DTensors", "flat pieces", "a stage"]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: by class name, optimizers that update each number by itself: of torch, DeepSpeed and apex, and of others
_ELEMENTWISE = _names(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam FusedAdam FusedSGD FusedAdagrad "
    "DeepSpeedCPUAdam DeepSpeedCPUAdagrad DeepSpeedCPULion FusedLion "
    "Lion AdaBelief AdaBound Adan Adopt AdEMAMix MADGRAD NAdamW NAdamLegacy AdamWLegacy RMSpropTF SGDW Sophia SophiaG "
    "Yogi AdamWScheduleFree RAdamScheduleFree SGDScheduleFree StableAdamW"
)
#: those that look at a parameter as a whole: its norm, its rows and columns
_WHOLE = _names(
    "Adafactor AdafactorBigVision AdamP SGDP CAME FusedLAMB FusedLamb FusedNovoGrad LAMB Lamb LARS Lars Muon NovoGrad "
    "NvNovoGrad SOAP Shampoo DistributedShampoo GaLoreAdamW GaLoreAdafactor Adam_mini"
)
#: those that estimate one rate over all parameters, and all that look at all of them together
_RATES = _names("DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Prodigy")
_TOGETHER = _SAM | _RATES | _names("FusedLAMB LAMB Lamb")
#: packages whose kernels are given the address of a tensor's numbers, which a DTensor does not have
_NATIVE = ("deepspeed.", "bitsandbytes.", "apex.")
#: that keep their state in tensors of their own, quantized in blocks
_LOW_BIT = ("torchao.",)
#: Adafactor mixes DTensors with plain ones
_CANNOT: dict[Shards, tuple[frozenset[str], tuple[str, ...]]] = {
    "DTensors": (_RATES | {"Adafactor"}, _NATIVE),
    "flat pieces": (_WHOLE | _TOGETHER, _LOW_BIT),
    "a stage": (_TOGETHER, ()),
}


def check_shards(optimizer: Optimizer, shards: Shards, where: str, faults: Faults) -> None:
    """Note an optimizer that cannot step on ``shards``; warn where its class is not a known one."""
    if shards == "DTensors" and not any(isinstance(parameter, DTensor) for parameter in grads.parameters_of(optimizer)):
        return
    every, name = list(parts(optimizer)), type(optimizer).__name__
    kinds, (refused, packages) = [kind for part in every for kind in type(part).__mro__], _CANNOT[shards]
    if any(kind.__name__ in refused or kind.__module__.startswith(packages or ("-",)) for kind in kinds):
        given = f"{name} on {where}, which needs whole parameters, or plain tensors of them"
        faults.add(given, fix="use AdamW, SGD or Lion, which update each number by itself, or strategy='mp_ddp'")
        return
    owners = [next(kind for kind in type(part).__mro__ if "step" in vars(kind)) for part in every[1:] or every]
    known = _ELEMENTWISE | _WHOLE | _TOGETHER
    if not all(one.__name__ in known or one.__module__.startswith((*_NATIVE, *_LOW_BIT)) for one in owners):
        rank_zero_warn(
            f"{name} on {where}: it is not known whether its step treats each number by itself, as AdamW's, SGD's and "
            "Lion's do. If it uses norms or matrices of whole parameters, results differ from those on one device"
        )


def parts(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those that it holds."""
    yield optimizer
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer):
            yield from parts(inner)


# ------------------------------------------------------------------ half precision


def warn_of_eps(optimizer: Optimizer) -> None:
    """Warn where an ``eps`` added to fp16 state rounds to 0 (below 2**-25); fused kernels compute in fp32."""
    if any(
        not group.get("fused") and 0 < group["eps"] <= 2.0**-25 and parameter.dtype is torch.float16
        for group in optimizer.param_groups
        if is_number(group.get("eps"))  # Adafactor has two
        for parameter in group["params"]
    ):
        rank_zero_warn(
            f"{type(optimizer).__name__}'s eps is 0 in fp16, so its first step divides by zero wherever a gradient is "
            "small: set eps=1e-4, use fused=True, or store parameters in fp32 ('16-mixed')"
        )
