"""Properties of an optimizer that a plan needs: its use of the closure, its rounding, its parts.

``check_shards`` refuses optimizers that cannot step on shards.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Literal, cast

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import hooks_before_step
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads
from lightning_mp.numerics.grads import steps_as_torch

# Optimizer classes by their names in lower case.
#: SAM and its variants, which evaluate the closure a second time
_SAM = {"asam", "esam", "gsam", "looksam", "sam", "wsam"}
#: optimizers that estimate one learning rate from all parameters
_RATES = {"dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "prodigy"}
#: optimizers whose update of a parameter depends on all parameters
_TOGETHER = _SAM | _RATES | {"fusedlamb", "lamb"}
#: optimizers that use the rows and columns of a whole parameter
_MATRICES = {"adafactor", "adafactorbigvision", "came", "galoreadamw", "galoreadafactor", "adam_mini", "soap", "muon"}
#: optimizers that use the norm of a whole parameter
_NORMS = {"adamp", "fusednovograd", "lars", "novograd", "nvnovograd", "sgdp"}
#: optimizers that need whole parameters
_WHOLE = _MATRICES | _NORMS | {"shampoo", "distributedshampoo"}

#: kinds of sharded parameters: FSDP2's DTensors, pieces of flat tensors, one stage's parameters
Shards = Literal["DTensors", "flat pieces", "a stage"]
# - Kernels of these packages read a tensor's memory address, which a DTensor does not have.
# - Adafactor mixes DTensors with plain tensors.
# - torchao quantizes optimizer states in blocks, which flat pieces cut.
#: by kind of shard, the classes and the packages of optimizers that cannot step on it
_CANNOT: dict[Shards, tuple[set[str], tuple[str, ...]]] = {
    "DTensors": (_RATES | {"adafactor"}, ("deepspeed.", "bitsandbytes.", "apex.")),
    "flat pieces": (_WHOLE | _TOGETHER, ("torchao.",)),
    "a stage": (_TOGETHER, ()),
}
#: torch's functions that look at the norm of many gradients
_CLIP_FUNCTIONS = {"clip_grad_norm", "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"}
#: packages whose functions are not searched for calls of these
_HOSTS = ("torch.", "deepspeed.", "lightning.", "pytorch_lightning.")


def _step_parameters(optimizer: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the class's ``step``, or of the instance's if the class has none.

    The second case is a wrapper that forwards attributes to its optimizer.
    """
    step = getattr(type(optimizer), "step", None) or optimizer.step
    return inspect.signature(step).parameters


def requires_closure(optimizer: Any) -> bool:
    """True if the optimizer cannot step without a closure (LBFGS and its kind)."""
    closure = _step_parameters(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def takes_closure(optimizer: Any) -> bool:
    """True if the optimizer's ``step`` accepts a closure and is not torch's own.

    torch's own optimizers, except LBFGS, only call it before they step, so it makes no difference.
    """
    if steps_as_torch(optimizer):
        return False
    parameters = _step_parameters(optimizer)
    return "closure" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def evaluates_again(optimizer: Any) -> bool:
    """True if the optimizer, or one of its parts, requires a closure (LBFGS) or is a SAM."""
    return any(requires_closure(part) or _is_sam(part) for part in parts(optimizer))


def _is_sam(optimizer: Any) -> bool:
    """True if a class of the optimizer has SAM's name, or ``first_step`` and ``second_step``."""
    kind = type(optimizer)
    by_name = not _SAM.isdisjoint(each.__name__.lower() for each in kind.__mro__)
    return by_name or (hasattr(kind, "first_step") and hasattr(kind, "second_step"))


def rounds_at_random(optimizer: Any) -> bool:
    """True if an option for stochastic rounding is True in the optimizer or in one of its parts.

    An example is torchao's ``bf16_stochastic_round``.
    """
    options = [each for part in parts(optimizer) for each in (_attributes(part), *part.param_groups)]
    return any("stochastic_round" in str(name) and value is True for each in options for name, value in each.items())


def needs_whole_parameters(name: str) -> bool:
    """True if an optimizer of this class name cannot step pieces of flat tensors."""
    return name.lower() in _WHOLE | _TOGETHER


def check_shards(optimizer: Optimizer, shards: Shards, where: str, faults: Faults) -> None:
    """Add a fault if the optimizer, or one of its parts, is known to fail on ``shards``.

    ``where`` describes the shards in the message. An optimizer of plain tensors passes the check
    for DTensors.
    """
    if shards == "DTensors" and not any(isinstance(parameter, DTensor) for parameter in grads.parameters_of(optimizer)):
        return
    kinds = [kind for part in parts(optimizer) for kind in type(part).__mro__]
    refused, packages = _CANNOT[shards]
    if any(kind.__name__.lower() in refused or kind.__module__.startswith(packages) for kind in kinds):
        given = f"{type(optimizer).__name__} on {where}, which needs whole parameters, or plain tensors of them"
        faults.add(given, fix="use AdamW, SGD or Lion, which update each number by itself, or strategy='mp_ddp'")


def clips_by_norm(optimizer: Any) -> bool:
    """True if the optimizer's ``step``, or a hook before it, is known to clip gradients by a norm.

    The code, or a function that this code names, names one of torch's functions for that; or the
    option ``max_grad_norm`` is positive and finite, as in timm's Adan.
    """
    options = [getattr(optimizer, "defaults", {}), *optimizer.param_groups]
    if any(0 < (each.get("max_grad_norm") or 0) < math.inf for each in options):
        return True
    steps = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    steps += [_attributes(optimizer).get("step"), *hooks_before_step(optimizer)]
    functions: list[Any] = [step for step in steps if callable(step)]
    for function in functions:  # the list grows during the loop
        plain = inspect.unwrap(getattr(function, "__func__", function))
        if not inspect.isfunction(plain) or str(plain.__module__).startswith(_HOSTS):
            continue
        names = _names_in(plain.__code__)
        called = _functions_named(plain, names, type(optimizer))
        if not _CLIP_FUNCTIONS.isdisjoint([*names, *(each.__name__ for each in called)]):
            return True
        functions += [each for each in called if all(each is not other for other in functions)]
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in ``code`` and in the functions that it defines."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _functions_named(function: Any, names: set[str], kind: type) -> list[Any]:
    """Return the Python functions that ``function`` may call by these names.

    They are globals, methods of ``kind`` and what the closure of ``function`` holds.
    """
    values: list[Any] = [function.__globals__.get(name) for name in names]
    values += [getattr(kind, name, None) for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable of the closure that has no value yet
            values.append(cell.cell_contents)
    return [value for value in values if inspect.isfunction(value)]


def _attributes(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizer and, recursively, the optimizers in its attributes.

    Lists, tuples and dicts that are attributes are searched too, one level deep.
    """
    optimizers: list[Any] = [optimizer]
    for part in optimizers:  # the list grows during the loop
        for value in _attributes(part).values():
            inside: list[Any] = [value]
            if isinstance(value, (list, tuple)):
                inside = list(cast("Sequence[Any]", value))
            elif isinstance(value, dict):
                inside = list(cast("dict[Any, Any]", value).values())
            for each in inside:
                if isinstance(each, Optimizer) and all(each is not other for other in optimizers):
                    optimizers.append(each)
    return optimizers
