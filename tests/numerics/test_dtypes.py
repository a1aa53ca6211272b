"""Names to dtypes, and casts of whatever modules take and give."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from itertools import chain
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import CausalLMOutput

from lightning_mp.numerics.dtypes import cast_, cast_floating, castable, floating_dtype

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Point = namedtuple("Point", "x y")
X, IDS = torch.ones(2), torch.arange(2)
NESTED: dict[str, Any] = {
    "tensor": X, "tuple": (X, IDS), "list": [X, [IDS, X]], "namedtuple": Point(X, 3),
    "dict": {"a": X, "b": {"c": (X, None)}}, "OrderedDict": OrderedDict(a=X, b=IDS),
    "defaultdict": defaultdict(list, a=X, b=IDS),
    "ModelOutput": CausalLMOutput(loss=X, logits=X, hidden_states=(X, X)), "PackedSequence": pack_sequence([X]),
    "return type": torch.stack((X, X)).max(0), "read-only mapping": MappingProxyType({"a": X}),
}  # fmt: skip


def leaves(data: Any) -> list[Any]:
    if isinstance(data, dict | MappingProxyType):
        data = list(data.values())
    if isinstance(data, tuple | list):
        return [leaf for item in data for leaf in leaves(item)]
    return [data]


@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED)
def test_every_floating_tensor_is_cast_and_the_container_stays_what_it_is(data: Any) -> None:
    made = cast_floating(data, BF16)
    assert type(made) is type(data)
    for old, new in zip(leaves(data), leaves(made), strict=True):
        if isinstance(old, Tensor) and old.is_floating_point():
            assert new.dtype == BF16
            assert old.dtype == FP32, "what was given is not changed"
        else:
            assert new is old


def test_a_modules_own_parameters_and_buffers_are_cast_and_stay_the_same_objects() -> None:
    module = nn.BatchNorm1d(2)
    objects = {name: id(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    cast_(chain(*castable(module)), BF16)
    assert {name: t.dtype for name, t in module.state_dict().items()} == {
        "weight": BF16, "bias": BF16, "running_mean": BF16, "running_var": BF16, "num_batches_tracked": torch.int64,
    }  # fmt: skip
    assert {name: id(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]} == objects


def test_complex_parameters_and_tensor_subclasses_are_left_alone() -> None:
    class Quantised(Tensor):
        pass

    module = nn.Module()
    module.phase = nn.Parameter(X * 1j)
    module.packed = nn.Parameter(X.clone().as_subclass(Quantised))
    module.register_buffer("table", X.clone().as_subclass(Quantised))
    assert castable(module) == ([], [])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_dataclass_is_copied_with_its_floating_fields_cast(frozen: bool) -> None:
    kind = dataclasses.make_dataclass("Batch", ["x", "labels", "name"], frozen=frozen)
    given = kind(torch.ones(2), torch.ones(2, dtype=torch.int64), "a")
    cast = cast_floating(given, BF16)
    assert type(cast) is kind
    assert (cast.x.dtype, cast.labels, cast.name) == (BF16, given.labels, "a")
    assert given.x.dtype == torch.float32
    assert floating_dtype(cast) is BF16
    assert cast_floating(cast, BF16) is cast
