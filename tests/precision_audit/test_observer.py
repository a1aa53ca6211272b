"""What is seen of a module while it runs: the dtypes of its inputs, outputs and operators, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mp.compat.torch import cpu_has_lstm
from lightning_mp.precision_audit.judge import computed
from lightning_mp.precision_audit.observer import Observed, Watch, note_gradients, note_parameters

BF16 = torch.bfloat16


def watched(
    module: nn.Module, *inputs: Any, autocast: torch.dtype | None = BF16, backward: bool = True
) -> dict[str, Observed]:
    """One forward pass, and backward from the sum of its output."""
    modules = dict(module.named_modules())
    watch = Watch(modules)
    watch.start()
    try:
        with watch:
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                output = module(*inputs)
            output = output[0] if isinstance(output, tuple) else output
            if backward:
                output.float().sum().backward()
    finally:
        watch.stop()
    note_gradients(watch.seen, modules)
    note_parameters(watch.seen, modules, {})
    return watch.seen


class Runs(nn.Module):
    """Calls ``how`` with its layer, in the way a user's own module would."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


def _off(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer(x.float())


#: module, input, autocast → what its (only) layer computed in
COMPUTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any, set[str]]] = {
    "linear": (lambda: nn.Linear(8, 8), (2, 8), BF16, {"bf16"}),
    "linear without autocast": (lambda: nn.Linear(8, 8), (2, 8), None, {"fp32"}),
    "linear in fp16": (lambda: nn.Linear(8, 8), (2, 8), torch.float16, {"fp16"}),
    "stored in half": (lambda: nn.Linear(8, 8).bfloat16(), (2, 8), BF16, {"bf16"}),
    "stored in double": (lambda: nn.Linear(8, 8).double(), (2, 8), None, {"fp64"}),
    "convolution": (lambda: nn.Conv1d(8, 4, 3), (2, 8, 6), BF16, {"bf16"}),
    "recurrent": (lambda: nn.LSTM(8, 8), (3, 2, 8), BF16, {"bf16"}),
    "norm of fp32": (lambda: nn.LayerNorm(8), (2, 8), BF16, {"fp32"}),
    "group norm": (lambda: nn.GroupNorm(2, 8), (2, 8), BF16, {"fp32"}),
    "batch norm": (lambda: nn.BatchNorm1d(8), (2, 8), BF16, {"fp32"}),
    "rms norm": (lambda: nn.RMSNorm(8), (2, 8), BF16, {"fp32"}),
    "elementwise": (nn.PReLU, (2, 8), None, {"fp32"}),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_what_a_layer_computes_in(case: str) -> None:
    make, shape, autocast, wanted = COMPUTED[case]
    if case == "recurrent" and not cpu_has_lstm(torch.bfloat16):
        autocast, wanted = None, {"fp32"}  # oneDNN has no bf16 LSTM on this CPU
    layer = make()
    x = torch.randn(shape, dtype=torch.float64 if "double" in case else torch.float32)
    root = nn.Sequential(layer)
    assert computed(watched(root, x, autocast=autocast)["0"]) == wanted


#: what a user's module does inside → what its layer computed in, or the module itself where the layer is not called
INSIDE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, set[str]]] = {
    "autocast turned off": (_off, "layer", {"fp32"}),
    "another autocast": (lambda layer, x: _under(torch.float16, layer, x), "layer", {"fp16"}),
    "weights used without a call": (lambda layer, x: nn.functional.linear(x, layer.weight), "", {"bf16"}),
    "a product of its own": (lambda layer, x: layer(x) @ layer.weight, "", {"bf16"}),
    "recomputed": (lambda layer, x: checkpoint(layer, x, use_reentrant=False), "layer", {"bf16"}),
}


def _under(dtype: torch.dtype, layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype):
        return layer(x)


@pytest.mark.parametrize("case", INSIDE)
def test_what_runs_is_told_of_the_innermost_module(case: str) -> None:
    how, where, wanted = INSIDE[case]
    seen = watched(nn.Sequential(Runs(how)), torch.randn(2, 8, requires_grad=True))
    assert computed(seen[f"0.{where}".rstrip(".")]) == wanted


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_widening_in_plain_attention_is_told_from_a_product(dropout: float) -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=dropout)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    seen = watched(Attends(), torch.randn(3, 2, 8))["attention"]
    products = {dtype for ran in seen.ran if ran.kind == "product" for dtype in ran.dtypes}
    assert (products, seen.attends) == (({"bf16", "fp32"}, True) if dropout else ({"bf16"}, False))


def test_backward_and_the_optimizer_are_not_the_root() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return x @ self.weight

    module = Own()
    modules = dict(module.named_modules())
    watch = Watch(modules)
    watch.start()
    with watch:
        module(torch.randn(2, 8)).float().sum().backward()
        with torch.no_grad():
            module.weight @ module.weight  # an optimizer that orthogonalises
    watch.stop()
    assert computed(watch.seen[""]) == {"bf16"}


# dynamo itself asks intermediate tensors for their gradient
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@compiles
@pytest.mark.parametrize("how", ["wrapped", "in place", "its forward"])
def test_compiled_modules_compile_and_are_told_to_be_hidden(how: str) -> None:
    from torch._dynamo.testing import CompileCounter

    counter, inner = CompileCounter(), Runs(lambda layer, x: layer(x))
    if how == "wrapped":
        compiled: Any = torch.compile(inner, backend=counter)
    elif how == "in place":
        inner.compile(backend=counter)
        compiled = inner
    else:
        inner.forward = torch.compile(inner.forward, backend=counter)  # type: ignore[method-assign]
        compiled = inner
    module, x = nn.Sequential(nn.Linear(8, 8), compiled), torch.randn(2, 8)
    seen = watched(module, x, autocast=None)
    assert counter.frame_count == 1
    module(x)
    assert counter.frame_count == 1  # nothing to guard against was left in it
    assert {name for name, one in seen.items() if one.hidden} == {name for name in seen if name.startswith("1")}
    assert computed(seen["0"]) == {"fp32"}
    assert not seen["1"].input
    torch._dynamo.reset()


@compiles
def test_a_function_compiled_inside_a_module_compiles_and_keeps_no_trace() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    run = torch.compile(lambda layer, x: layer(x).sin(), backend=counter, fullgraph=True)
    module, x = nn.Sequential(Runs(run)), torch.randn(2, 8)
    seen = watched(module, x, autocast=None)
    assert counter.frame_count == 1
    assert not seen["0.layer"].input
    module(x)
    assert counter.frame_count <= 2  # again without hooks, once at most
    count = counter.frame_count
    module(x)
    assert counter.frame_count == count
    torch._dynamo.reset()
