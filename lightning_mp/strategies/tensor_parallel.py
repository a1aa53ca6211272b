"""Tensor parallelism by a transformers model's own plan, or one the user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_mp.errors import Faults, nearest
from lightning_mp.numerics.patterns import has_own_forward, matches, named_submodules

Plan = Mapping[str, str | ParallelStyle]

#: transformers' names of styles (integrations/tensor_parallel.py) in torch's terms
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicate": None,
}


class Replicated(ParallelStyle):
    """A module that every rank of the tensor-parallel group computes whole.

    Its parameters become DTensors as the split ones are: torch's fused and multi-tensor optimizers take parameters
    of one mesh only.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _wrap_inputs, _unwrap_output)


def _wrap_inputs(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(
        DTensor.from_local(item, mesh, [Replicate()], run_check=False)
        if hasattr(item, "layout") and not isinstance(item, DTensor)
        else item
        for item in inputs
    )


def _unwrap_output(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output


def styles(model: nn.Module, given: Plan | None, size: int, faults: Faults) -> dict[str, ParallelStyle]:
    """The style of every module that is split or replicated, by its name in ``model``; changes nothing."""
    patterns = dict(_patterns(model) if given is None else given.items())
    if not patterns:
        faults.add(
            f"tensor_parallel={size} on {type(model).__name__}",
            "a transformers model with a tp_plan of its own, or tp_plan={pattern: style}",
            "pass tp_plan={'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}, or remove tensor_parallel",
        )
        return {}
    found: dict[str, ParallelStyle] = {}
    for pattern, style in patterns.items():
        made = _style(pattern, style, faults)
        names = [(name, module) for name, module in named_submodules(model) if matches(pattern, name, module)]
        if not names and given is not None:
            near = nearest(pattern.strip("*."), [name for name, _ in named_submodules(model)])
            faults.add(f"tp_plan pattern {pattern!r}, which matches no module", "a module's name", f"nearest: {near}")
        for name, module in names:
            if made is not None and any(True for _ in module.parameters(recurse=False)):
                _check_divides(name, module, made, size, faults)
                found[name] = made
    _check_heads(model, size, faults)
    return found


def parallelize(model: nn.Module, split: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Split ``model`` over ``mesh`` in place; what ``split`` does not name is computed whole by every rank."""
    whole = {
        name: Replicated()
        for name, module in named_submodules(model)
        if name not in split and has_own_forward(module) and any(True for _ in module.parameters(recurse=False))
    }
    for name, style in {**split, **whole}.items():
        parallelize_module(model.get_submodule(name), mesh, style)


def _patterns(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The plans of the outermost transformers models below ``model``, as patterns on its module names."""
    above: list[str] = []
    for name, module in named_submodules(model):
        plan = cast("Mapping[str, str] | None", getattr(module, "tp_plan", None))
        if not plan or any(name.startswith(f"{outer}.") for outer in above):
            continue
        above.append(name)
        for pattern, style in plan.items():
            if not pattern.endswith((".weight", ".bias")):
                yield f"{name}.{pattern}", style


def _style(pattern: str, style: Any, faults: Faults) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if style in _STYLES:
        make = _STYLES[style]
        return None if make is None else make()
    near = nearest(str(style), _STYLES)
    faults.add(
        f"tensor-parallel style {style!r} for {pattern!r}",
        ", ".join(_STYLES) + ", or a torch.distributed.tensor.parallel.ParallelStyle",
        f"did you mean {near}?" if near else "pass tp_plan= with styles of this list",
    )
    return None


def _check_divides(name: str, module: nn.Module, style: ParallelStyle, size: int, faults: Faults) -> None:
    weight = cast("Any", getattr(module, "weight", None))
    if weight is None or weight.dim() < 2:
        return
    # torch's Linear keeps (out, in), its Embedding (entries, width): both are split along 0 or 1
    along = 0 if isinstance(style, ColwiseParallel) else 1
    if isinstance(module, nn.Embedding):
        along = 1 - along
    if weight.shape[along] % size:
        faults.add(
            f"tensor_parallel={size} with {name}.weight of shape {tuple(weight.shape)}",
            f"a size that divides {weight.shape[along]}",
            "choose another tensor_parallel, or pad the layer",
        )


def _check_heads(model: nn.Module, size: int, faults: Faults) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            if hasattr(module, "tp_plan") and isinstance(heads, int) and heads % size:
                faults.add(
                    f"tensor_parallel={size} with {key}={heads}",
                    "a size that divides the attention heads",
                    f"choose tensor_parallel among the divisors of {heads}",
                )
                return
