"""What a plan has to know of an optimizer: its closure, and whether it can step on shards."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.errors import Faults
from lightning_mp.numerics import grads
from lightning_mp.numerics.grads import steps_as_torch

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


def _step_parameters(optimizer: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the optimizer's ``step``; of a wrapper without one, those of the optimizer that answers."""
    step = getattr(type(optimizer), "step", None) or optimizer.step
    return inspect.signature(step).parameters


def requires_closure(optimizer: Any) -> bool:
    """True if the optimizer cannot step without a closure (LBFGS and its kind)."""
    closure = _step_parameters(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def takes_closure(optimizer: Any) -> bool:
    """True if the optimizer may do something with a closure. Torch's own only call it first, which changes nothing."""
    if steps_as_torch(optimizer):
        return False
    parameters = _step_parameters(optimizer)
    return "closure" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def evaluates_again(optimizer: Any) -> bool:
    """True if it, or an optimizer that it holds, is of LBFGS's kind or of SAM's."""
    return any(requires_closure(part) or _is_sam(part) for part in parts(optimizer))


def _is_sam(optimizer: Any) -> bool:
    """True by the name of its class, or by the two steps that implementations of SAM have."""
    kind = type(optimizer)
    by_name = not _SAM.isdisjoint(each.__name__.lower() for each in kind.__mro__)
    return by_name or (hasattr(kind, "first_step") and hasattr(kind, "second_step"))


def rounds_at_random(optimizer: Any) -> bool:
    """True if an option of the optimizer, or of one that it holds, says so (torchao's ``bf16_stochastic_round``)."""
    options = [each for part in parts(optimizer) for each in (_attributes(part), *part.param_groups)]
    return any("stochastic_round" in str(name) and value is True for each in options for name, value in each.items())


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


def _attributes(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})


def parts(optimizer: Any) -> list[Any]:
    """The optimizer, and those that it holds as attributes, or in lists and mappings among them."""
    optimizers: list[Any] = [optimizer]
    for part in optimizers:  # grows meanwhile
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
