"""Which weights autocast alone computes with, so that a strategy may gather them in the compute dtype.

One rule for all strategies: the weights of linear layers, convolutions and attention's projections, which their
module's forward hands to a product that autocast casts for; less those that something else reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_mp.compat.transformers import conv1d
from lightning_mp.modules import fp8
from lightning_mp.modules.patterns import original_class
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import is_plain
from lightning_mp.policy import PrecisionPolicy

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
#: of peft's layers, what has the norms that DoRA takes of the weights below
_DORA = "lora_magnitude_vector"
#: what a subclass may not replace
_FORWARDS = ("forward", "_conv_forward")


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter, and why it is not computed with in half precision alone; ``None`` where it is."""

    name: str
    tensor: Tensor
    #: where modules hold it
    places: tuple[tuple[nn.Module, str], ...]
    reason: str | None


def survey(root: nn.Module, pin_map: PinMap, policy: PrecisionPolicy) -> list[Weight]:
    """Every parameter of ``root``, once; before or after it is sharded."""
    dora = (module for module in root.modules() if getattr(module, _DORA, None))
    special = {id(part): "read by DoRA" for module in dora for part in module.modules()}
    special |= {id(module): "computed with in FP8" for module in root.modules() if fp8.is_converted(module)}
    special |= {id(member.module): "pinned" for member in pin_map.members}
    names: dict[int, str] = {}
    found: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    for name, module in root.named_modules():
        for key, tensor in module.named_parameters(recurse=False):
            names.setdefault(id(tensor), f"{name}.{key}".strip("."))
            found.setdefault(id(tensor), (tensor, []))[1].append((module, key))
    weights: list[Weight] = []
    for name, (tensor, places) in zip(names.values(), found.values(), strict=True):
        reason = _reason(tensor, places, special) if policy.mixed else "computed with as stored"
        weights.append(Weight(name, tensor, tuple(places), reason))
    return weights


def _reason(tensor: Tensor, places: list[tuple[nn.Module, str]], special: dict[int, str]) -> str | None:
    for module, _ in places:
        if id(module) in special:
            return special[id(module)]
    if not (is_plain(tensor) or hasattr(tensor, "to_local")) or not tensor.is_floating_point():
        return "a tensor class of its own"
    others = [(module, key) for module, key in places if key not in _keys(module)]
    if not others:
        return None
    kind = original_class(others[0][0]).__name__
    return f"tied to {kind}.{others[0][1]}" if len(others) < len(places) else kind


def _keys(module: nn.Module) -> tuple[str, ...]:
    """The parameters of ``module`` that its forward does nothing with but hand them to one product."""
    cls = original_class(module)
    for kind in (*_LAYERS, *conv1d(), nn.MultiheadAttention):
        if issubclass(cls, kind):
            own = [vars(base) for base in cls.__mro__[: cls.__mro__.index(kind)]]
            if any(name in place for place in (vars(module), *own) for name in _FORWARDS):
                return ()
            return _PROJECTIONS if kind is nn.MultiheadAttention else ("weight", "bias")
    return ()
