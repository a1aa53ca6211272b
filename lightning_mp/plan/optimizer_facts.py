"""What a plan has to know of an optimizer: its closure, and whether it can step on shards."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.errors import Faults
from lightning_mp.numerics import grads

#: classes by their names, in any case of letters
_SAM = {"asam", "esam", "gsam", "looksam", "sam", "wsam"}
#: those that estimate one rate over all parameters, and all that look at all of them together
_RATES = {"dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "prodigy"}
_TOGETHER = _SAM | _RATES | {"fusedlamb", "lamb"}
#: those that look at a parameter as a whole: its norm, its rows and columns
_MATRICES = {"adafactor", "adafactorbigvision", "came", "galoreadamw", "galoreadafactor", "adam_mini", "soap", "muon"}
_NORMS = {"adamp", "fusednovograd", "lars", "novograd", "nvnovograd", "sgdp"}
_WHOLE = _MATRICES | _NORMS | {"shampoo", "distributedshampoo"}

#: what an optimizer is given to step: FSDP2's DTensors, pieces of flattened tensors, the parameters of one stage
Shards = Literal["DTensors", "flat pieces", "a stage"]
#: classes and packages that cannot: kernels that are given the address of a tensor's numbers, which a DTensor does not
#: have; torchao's state, quantized in blocks; Adafactor mixes DTensors with plain ones
_CANNOT: dict[Shards, tuple[set[str], tuple[str, ...]]] = {
    "DTensors": (_RATES | {"adafactor"}, ("deepspeed.", "bitsandbytes.", "apex.")),
    "flat pieces": (_WHOLE | _TOGETHER, ("torchao.",)),
    "a stage": (_TOGETHER, ()),
}


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer cannot step without a closure (LBFGS and its kind)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def evaluates_again(optimizer: Optimizer) -> bool:
    """Whether it is LBFGS, an optimizer of its kind, or by its name one of SAM's."""
    return requires_closure(optimizer) or not _SAM.isdisjoint(kind.__name__.lower() for kind in type(optimizer).__mro__)


def needs_whole_parameters(name: str) -> bool:
    """True if an optimizer of this class name cannot step pieces of flat tensors."""
    return name.lower() in _WHOLE | _TOGETHER


def check_shards(optimizer: Optimizer, shards: Shards, where: str, faults: Faults) -> None:
    """Note an optimizer that is known to be unable to step on ``shards``."""
    if shards == "DTensors" and not any(isinstance(parameter, DTensor) for parameter in grads.parameters_of(optimizer)):
        return
    kinds = [kind for part in parts(optimizer) for kind in type(part).__mro__]
    refused, packages = _CANNOT[shards]
    if any(kind.__name__.lower() in refused or kind.__module__.startswith(packages) for kind in kinds):
        given = f"{type(optimizer).__name__} on {where}, which needs whole parameters, or plain tensors of them"
        faults.add(given, fix="use AdamW, SGD or Lion, which update each number by itself, or strategy='mp_ddp'")


def parts(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those that it holds."""
    yield optimizer
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer):
            yield from parts(inner)
