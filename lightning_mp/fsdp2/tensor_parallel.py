"""Tensor parallelism by a transformers model's own plan, or by the user's."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import (
    Place,
    has_own_forward,
    matches,
    named_submodules,
    no_match,
    original_class,
    owners,
)

Plan = Mapping[str, str | ParallelStyle]

#: transformers' names of styles (integrations/tensor_parallel.py), as torch's classes
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicate": None,
}


class Replicated(ParallelStyle):
    """The style of a module that every rank of the tensor-parallel group computes in full.

    Its parameters become replicated DTensors, because torch's fused and multi-tensor optimizers
    take parameters of one mesh only.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicated(tensor: Any) -> Any:
            plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
            return DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False) if plain else tensor

        def wrap(_module: nn.Module, inputs: Any, _mesh: DeviceMesh) -> Any:
            return tuple(map(replicated, inputs))

        def unwrap(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, None, wrap, unwrap)


def styles(model: nn.Module, given: Plan | None, size: int, faults: Faults) -> dict[str, ParallelStyle]:
    """Return the style of each module that a plan names, by its name in ``model``.

    ``model`` is not changed. A module that the plan replicates is left out, and a module without
    parameters if the style is a name. ``faults`` takes unknown styles, patterns without a match,
    layers that cannot be split, and tied weights that are split in two ways.

    Args:
        model: the whole model.
        given: the user's plan, ``None`` for the plan of the transformers models in it.
        size: the number of tensor-parallel ranks, for messages.
        faults: the faults.
    """
    patterns = dict(_patterns(model) if given is None else given.items())
    if not patterns:
        faults.add(
            f"tensor_parallel={size} on {type(model).__name__}",
            fix="pass tp_plan={'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}, or remove tensor_parallel",
        )
        return {}
    named = list(named_submodules(model))
    by_name: dict[str, ParallelStyle] = {}
    for pattern, style in patterns.items():
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            faults.unknown(f"tensor-parallel style for {pattern!r}:", style, _STYLES)
            continue
        matched = [(name, module) for name, module in named if matches(pattern, name, module)]
        if not matched and given is not None:
            no_match(pattern, model, "tp_plan pattern", faults)
        for name, module in matched:
            if isinstance(style, ParallelStyle):
                by_name[name] = style
            elif _STYLES[style] is not None and _owns(module):
                by_name[name] = _STYLES[style]()
                if not isinstance(module, (nn.Linear, nn.Embedding)):
                    given_style = f"tensor-parallel style {style!r} for {name!r}, a {original_class(module).__name__}"
                    faults.add(given_style, fix="leave it out: it stays whole")
    _check_ties(model, by_name, faults)
    return by_name


def _check_ties(model: nn.Module, by_name: Mapping[str, ParallelStyle], faults: Faults) -> None:
    """Add a fault for each tied weight whose owners split it along different dimensions."""
    for places in _ties(model):
        ways = {f"{name}.{key}": _way(module, by_name.get(name)) for name, module, key in places}
        if len(set(ways.values())) > 1:
            faults.add(
                f"a tied weight that tensor parallelism splits in two ways: {' and '.join(ways)}",
                fix="give tp_plan= with matching styles, or untie them (transformers: tie_word_embeddings=False)",
            )


def parallelize(
    model: nn.Module,
    split: Mapping[str, ParallelStyle],
    mesh: DeviceMesh,
    before: Callable[[nn.Module], None],
) -> None:
    """Split ``model`` over ``mesh`` in place. Every rank calls it.

    Modules that ``split`` does not name are replicated. Ranks take the random seed of the group's
    first rank, so that dropout in replicated modules agrees. Tied parameters stay tied. ``before``
    is called with each module before it is split or replicated.
    """
    group, seed = mesh.get_group(), [torch.random.initial_seed()]
    dist.broadcast_object_list(seed, group_src=0, group=group)
    if seed[0] != torch.random.initial_seed():  # replicated modules must draw alike on all ranks
        torch.manual_seed(seed[0])
    named, ties = dict(named_submodules(model)), _ties(model)
    whole = {
        name: Replicated()
        for name, module in named.items()
        if name not in split and has_own_forward(module) and _owns(module)
    }
    for name, style in {**whole, **split}.items():
        before(named[name])
        parallelize_module(named[name], mesh, style)
    for (_, first, key), *others in ties:
        for _, module, other in others:
            setattr(module, other, getattr(first, key))


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _ties(model: nn.Module) -> list[list[Place]]:
    """Return the places of each parameter that has several.

    A module that is in the tree twice counts once.
    """
    distinct = ({(id(place[1]), place[2]): place for place in places} for places in owners(model).values())
    return [list(places.values()) for places in distinct if len(places) > 1]


def _way(module: nn.Module, style: ParallelStyle | None) -> Any:
    """Return a value that is equal for modules whose weights are split along one dimension.

    torch's Linear keeps its weight as (out, in), its Embedding as (entries, width).
    """
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return type(style)
    return isinstance(style, ColwiseParallel) == isinstance(module, nn.Embedding)


def _patterns(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (pattern, style) of the outermost transformers models below ``model``.

    Patterns are on module names of ``model``. Entries of single weights and biases are left out.
    """
    outermost: list[str] = []
    for name, module in named_submodules(model):
        plan = cast("Mapping[str, str] | None", getattr(module, "tp_plan", None))
        if plan and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
            yield from (
                (f"{name}.{key}", style) for key, style in plan.items() if not key.endswith((".weight", ".bias"))
            )
