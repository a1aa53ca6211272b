"""Choose the Linear layers whose products run in FP8, with a reason for each other one, and run them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_mp.compat import torchao
from lightning_mp.compat.transformers import conv1d
from lightning_mp.errors import Faults, counted
from lightning_mp.modules.patterns import (
    Swapped,
    covering,
    is_plain_linear,
    original_class,
    owners,
    swap_all,
)
from lightning_mp.numerics.grads import local
from lightning_mp.policy import FP8


@dataclass(frozen=True, slots=True)
class FP8Layer:
    """A Linear, a Conv1D, or the 3-D weight of experts, and the reason if it does not run in FP8.

    ``reason`` is ``None`` for a converted layer. The reasons are ``shape`` (a dimension is no
    multiple of 16, or of 32 under MXFP8), ``size`` (too small to be faster), ``skip``, ``pinned``,
    ``tied``, ``frozen``, ``adapter`` and ``kind`` (no plain Linear, or experts). The field
    ``shape`` is the weight's.
    """

    name: str
    converted: bool
    reason: str | None
    shape: tuple[int, ...]


def pays(recipe: str, out: int, into: int) -> bool:
    """True if a product of ``into`` to ``out`` features is faster in FP8 than in bf16 on an H100.

    The rule is torchao's, ``torchao.float8.float8_linear_utils._auto_filter_for_recipe``. torchao
    has no rule for ``rowwise_gw_hp`` and MXFP8, for which the rule for rowwise is used.
    """
    if recipe == "tensorwise":
        return into > 4096 or out > 1024
    return out > 2048 and into > 1024 and (out > 4096 or into > 2048)


def select(
    root: nn.Module, rule: FP8, pinned: Iterable[nn.Module], faults: Faults
) -> tuple[list[FP8Layer], list[nn.Module]]:
    """Return all layers below ``root``, and the modules to convert. Nothing is changed.

    The layers are each Linear, Conv1D and weight of experts, once; ``root`` itself is left out. A
    fault is added for a pattern of the user's that matches no module, and if no layer can be
    converted.
    """
    usual = (*FP8().patterns, *FP8().skip)  # a model may lack a module of that name
    wanted, _ = covering(root, rule.patterns, "fp8 pattern", faults, usual)
    skipped, _ = covering(root, rule.skip, "fp8 pattern", faults, usual)
    pins, adapters = {id(module) for module in pinned}, _adapters(root)
    tied = {key for key, places in owners(root).items() if len({id(module) for _, module, _ in places}) > 1}
    layers: list[FP8Layer] = []
    chosen: list[nn.Module] = []
    other_kinds: list[str] = []
    for name, module in root.named_modules():
        if not name or not isinstance(module, (nn.Linear, *conv1d())):
            layers += [FP8Layer(f"{name}.{key}", False, "kind", shape) for key, shape in _experts(module) if name]
            continue
        weight = cast("nn.Parameter", module.weight)
        # a sharded weight has another shape on this rank, so the module's own sizes count
        shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else tuple(weight.shape)
        reasons = (
            ("kind", not is_plain_linear(module)),
            ("pinned", id(module) in pins),
            ("skip", name not in wanted or name in skipped),
            ("tied", id(weight) in tied),
            ("adapter", id(module) in adapters),
            ("frozen", not weight.requires_grad),
            ("shape", any(size % rule.multiple for size in shape)),
            ("size", rule.small == "skip" and not pays(rule.recipe, *shape)),
        )
        reason = next((word for word, holds in reasons if holds), None)
        layers.append(FP8Layer(name, reason is None, reason, shape))
        if reason is None:
            chosen.append(module)
        elif reason == "kind":
            other_kinds.append(original_class(module).__name__)
    if not chosen:
        listed = "; ".join(table(layers)) or "it has no Linear"
        fix = f"convert small ones by FP8(small='convert'), round dimensions up to a multiple of {rule.multiple}"
        given = f"precision='fp8-mixed' on a model of which nothing can be converted: {listed}"
        if other_kinds:
            given += f". A {' or a '.join(dict.fromkeys(other_kinds))} is no torch.nn.Linear, which alone is converted"
        faults.add(given, fix=f"{fix}, or use precision='bf16-mixed'")
    return layers, chosen


def _experts(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the module's own 3-D parameters, which hold a matrix for each expert.

    Parameters of torch.nn's classes (convolution kernels) are left out, and parameters with a
    dimension of 1 (rows that are added to every batch).
    """
    if original_class(module).__module__.startswith("torch.nn."):
        return []
    own = {key: weight for key, weight in module.named_parameters(recurse=False) if not is_lazy(weight)}
    return [(key, tuple(weight.shape)) for key, weight in own.items() if weight.ndim == 3 and min(weight.shape) > 1]


def _adapters(root: nn.Module) -> set[int]:
    """Return ``id`` of the modules of adapters in peft's layers (``BaseTunerLayer``)."""
    names = ((module, getattr(module, "adapter_layer_names", None) or ()) for module in root.modules())
    added = (getattr(module, name, None) for module, own in names for name in own)
    return {id(part) for module in added if isinstance(module, nn.Module) for part in module.modules()}


# ------------------------------------------------------------------ in words


def table(layers: Iterable[FP8Layer]) -> list[str]:
    """Return a line for each form of layer, such as ``2 x model.layers.*.mlp.up_proj (256, 64): size``.

    Layers are of one form if their names differ only in indices, and shape and reason are equal.
    """
    forms = ((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer.name), layer.shape, layer.reason or "fp8") for layer in layers)
    return [
        f"{f'{count} x ' if count > 1 else ''}{form} {shape}: {reason}"
        for (form, shape, reason), count in Counter(forms).items()
    ]


def summary(layers: Sequence[FP8Layer]) -> str:
    """Return text such as ``12 of 14 layers in fp8; left in bf16: 1 size, 1 skip``."""
    reasons = [layer.reason for layer in layers if layer.reason]
    left = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
    converted = f"{len(layers) - len(reasons)} of {counted(len(layers), 'layer')} in fp8"
    return f"{converted}; left in bf16: {left}" if left else converted


# ------------------------------------------------------------------ largest magnitudes

#: the tensors that a converted layer rounds to FP8; ``gradient`` is of its output
Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = get_args(Role)


@torch.no_grad()
def largest_magnitude(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in this rank's part of ``tensor``: an fp32 scalar on its device, NaN if one is."""
    part = local(tensor.detach())
    return torch.linalg.vector_norm(part, ord=inf).float()


class Magnitudes:
    """The largest magnitudes of the inputs and gradients of converted layers, kept on the device.

    They are collected while ``active``, over all forward passes that record gradients. Layers that
    ``torch.compile`` runs are left out.
    """

    def __init__(self) -> None:
        self.active = False
        self._largest: dict[tuple[nn.Module, Role], Tensor] = {}

    def watch(self, module: nn.Module, rows: Tensor, output: Tensor) -> None:
        """Record the input ``rows`` of ``module``, and the gradient of its ``output`` once there is one."""
        self._add(module, "input", rows)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._add(module, "gradient", gradient))

    def _add(self, module: nn.Module, role: Role, tensor: Tensor) -> None:
        if not self.active:  # a late gradient of an earlier step
            return
        largest = largest_magnitude(tensor)
        before = self._largest.get((module, role))
        self._largest[module, role] = largest if before is None else torch.maximum(before, largest)

    def take(self) -> dict[tuple[nn.Module, Role], Tensor]:
        """Stop collecting, return the largest magnitudes by module and role, and clear them."""
        self.active = False
        largest, self._largest = self._largest, {}
        return largest


# ------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class Running:
    """The state that a run's converted layers share, copies of the layers included. A pickle holds ``None``."""

    recipe: str
    product: torchao.Product
    #: the number of rows is padded to a multiple of this
    multiple: int
    dtype: torch.dtype
    device_type: str
    #: an object with the Trainer's ``stage``, and the stage of training, or None without a Trainer
    stages: tuple[Any, Any] | None
    evaluate: bool
    magnitudes: Magnitudes = field(default_factory=Magnitudes)

    def __deepcopy__(self, memo: Any) -> Running:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled module belongs to no run, and must not need torchao

    def now(self) -> bool:
        """True if products run in FP8 now.

        Autocast must be on, and the Trainer in its training stage. Without a Trainer gradients must
        be on. With ``evaluate``, autocast is enough.
        """
        if not torch.is_autocast_enabled(self.device_type):
            return False
        if self.stages is None:
            return self.evaluate or torch.is_grad_enabled()
        run, training = self.stages
        return self.evaluate or run.stage == training


class FP8Forward(Swapped):
    """Mix-in of a Linear that multiplies in FP8 while the plan trains. At other times it is unchanged."""

    lmp_state = ("_lmp_fp8",)
    _lmp_fp8: Running

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in autocast's dtype, of shape (..., out) for ``input`` of shape (..., in).

        The product is a Linear's usual one if FP8 is off now, the weight is frozen, or ``input`` is
        empty.
        """
        running = self.__dict__.get("_lmp_fp8")
        module = cast("nn.Linear", self)
        # FP8 would compute a frozen weight's gradient too, and an empty tensor has no largest entry
        if running is None or not running.now() or not module.weight.requires_grad or not input.numel():
            if torchao.holds_fp8(module.weight):  # FSDP2 gathered it in FP8
                return nn.functional.linear(input, torchao.restored(module.weight), module.bias)
            return cast("Any", super()).forward(input)
        rows = input.to(running.dtype).reshape(-1, input.shape[-1])
        count = rows.shape[0]
        if count % running.multiple:  # the weight's gradient is a product over the rows
            rows = nn.functional.pad(rows, (0, 0, 0, -count % running.multiple))
        # torchao only regards CUDA's autocast, and its tensors lack the operators of inference mode
        with torch.autocast(running.device_type, enabled=False), _no_inference_mode():
            output = running.product(rows, module.weight.t())[:count]
            if not torch.compiler.is_compiling() and running.magnitudes.active and torch.is_grad_enabled():
                running.magnitudes.watch(module, rows, output)
        output = output.reshape(*input.shape[:-1], -1)
        bias = cast("Tensor | None", module.bias)
        return output if bias is None else output + bias.to(output.dtype)


@contextmanager
def _no_inference_mode() -> Generator[None, None, None]:
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_converted(module: nn.Module) -> bool:
    """True if a plan converted the module to FP8 products and the run is not over."""
    return module.__dict__.get("_lmp_fp8") is not None


def converted(root: nn.Module) -> tuple[dict[str, nn.Module], Running | None]:
    """Return the converted layers below ``root`` by name, and their shared state, ``None`` without layers."""
    layers = {name: module for name, module in root.named_modules() if is_converted(module)}
    shared = next((module.__dict__["_lmp_fp8"] for module in layers.values()), None)
    return layers, shared


def apply(
    modules: Iterable[nn.Module], rule: FP8, dtype: torch.dtype, device_type: str, stages: tuple[Any, Any] | None = None
) -> Callable[[], None]:
    """Convert ``modules`` in place, and return a function that undoes it.

    Parameters are unchanged. ``dtype`` is autocast's. ``stages`` is the field of :class:`Running`.
    """
    product = torchao.product(rule.recipe, emulate=rule.emulate)
    running = Running(rule.recipe, product, rule.multiple, dtype, device_type, stages, rule.evaluate == "fp8")
    return swap_all(modules, FP8Forward, _lmp_fp8=running)
