"""Dimensions that tensor cores have to pad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from lightning_mp.modules.class_swap import original_class
from lightning_mp.monitor.doctor.case import Case, listed
from lightning_mp.monitor.findings import Finding

#: 16 bytes, of what the product runs in: NVIDIA's "Deep Learning Performance Guide", matrix multiplication,
#: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (table 1)
MULTIPLES = {"fp16": 8, "bf16": 8, "fp8": 16}
#: below this part of the weights that are multiplied, odd sizes (a head with 10 classes) cost nothing worth naming
_SHARE = 0.1
#: a table as small as this holds segments or classes, no vocabulary
_SMALL_TABLE = 32


def conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``, GPT-2's linear layer."""
    return original_class(module).__name__ == "Conv1D" and hasattr(module, "nf")


def not_aligned(case: Case) -> Iterator[Finding]:
    """Linear layers, and a vocabulary, whose sizes are not multiples of a tensor core's tile."""
    odd: dict[str, tuple[int, ...]] = {}
    compute = "fp8" if case.policy is not None and case.policy.fp8 is not None else case.compute
    weights, multiple = 0, MULTIPLES.get(compute, 1)
    vocabularies = {module.num_embeddings for _, module in case.modules if isinstance(module, nn.Embedding)}
    vocabulary: int | None = None
    for name, module in case.modules:
        sizes = _sizes(module)
        step = MULTIPLES.get(case.pinned.get(id(module)) or compute, 1)
        if sizes is None or all(size % step == 0 for size in sizes):
            continue
        multiple = max(multiple, step)
        odd[name] = sizes
        weights += sizes[0] * sizes[1]
        if sizes[1] in vocabularies and sizes[1] > _SMALL_TABLE and sizes[1] % step:
            vocabulary = sizes[1]
    if odd and (vocabulary is not None or weights >= _SHARE * _multiplied(case)):
        yield _finding(odd, vocabulary, multiple, compute)


def _finding(odd: dict[str, tuple[int, ...]], vocabulary: int | None, multiple: int, compute: str) -> Finding:
    shapes = listed([f"{name or 'the model itself'} ({' x '.join(map(str, sizes))})" for name, sizes in odd.items()])
    words, fix = "", f"round sizes up to multiples of {multiple}"
    if vocabulary is not None:
        to = -(-vocabulary // multiple) * multiple
        words = f"; among them the vocabulary, {vocabulary}"
        fix = f"pad the vocabulary to {to}: model.resize_token_embeddings({to}), or vocab_size={to}"
        if len(odd) > 1:
            fix += f"; round other sizes up to multiples of {multiple}"
    return Finding(
        name="dims_not_aligned",
        severity="info",
        what=f"sizes that are not multiples of {multiple}: {shapes}{words}",
        why=f"tensor cores multiply {compute} in tiles of 16 bytes; other sizes are padded or use slower kernels",
        fix=fix,
        where=next(iter(odd)),
    )


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a layer that multiplies."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if conv1d(module):
        weight = cast("Any", module).weight
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def _multiplied(case: Case) -> int:
    """How many weights take part in products: all matrices, but for those that are only looked up."""
    lookups = {id(module.weight) for _, module in case.modules if isinstance(module, nn.Embedding)}
    lookups -= {id(module.weight) for _, module in case.modules if isinstance(module, nn.Linear)}
    return sum(p.numel() for _, _, p in case.owned if p.ndim >= 2 and id(p) not in lookups)
