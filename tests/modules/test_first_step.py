"""What a first step is refused for, and what ordinary models do with pinned weights that is not."""

import copy
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.families import FAMILIES, TEXT
from lightning_mp.errors import PlanError
from lightning_mp.modules.first_step import FirstStep
from lightning_mp.numerics.dtypes import cast_floating, default_dtype
from support.pinning import pin, resolve

WIDTH = 8
X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def first_step(root: nn.Module, pins: dict[str, str], mode: str, x: Any = X) -> Tensor:
    pin(root, pins, mode=mode)
    compute = "fp16" if mode.startswith("16") else "bf16"
    half = AUTOCAST.get(mode, torch.bfloat16)
    around = torch.autocast("cpu", half, cache_enabled=False) if mode in AUTOCAST else default_dtype(half)
    with around, FirstStep(root, resolve(root, pins).members, compute, {}):
        return root(x if mode in AUTOCAST else cast_floating(x, half))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.token.expand(len(x), -1)


class Prototypes(Tokens):
    def forward(self) -> Tensor:
        return self.token


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _off(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.head(F.linear(x, self.inner.weight))


def _penalty(self: Any, x: Tensor) -> Tensor:
    """As for a gradient penalty: its backward pass runs within the step, and under autocast."""
    x = x.requires_grad_()
    out = self.head(self.inner(x))
    return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum()


def _attention(self: Any, x: Tensor) -> Tensor:
    """As WavLM does it: the projections are modules, and torch's function is given their weights."""
    x, w, b = x[:, None], self.inner.weight, self.inner.bias
    rest = (None, torch.cat([b, b, b]), None, None, False, 0.0, torch.eye(WIDTH, dtype=x.dtype), None)
    weights = {"use_separate_proj_weight": True, "q_proj_weight": w, "k_proj_weight": w, "v_proj_weight": w}
    return F.multi_head_attention_forward(x, x, x, WIDTH, 2, *rest, **weights)[0]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def hooked() -> nn.Linear:
    layer = linear()
    layer.register_forward_pre_hook(lambda module, _: (module.weight @ module.weight.t(), None)[1])
    return layer


def _decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A profiler's or a logger's decorator: the same line of Python calls a cast, and then a product."""

    def wrapper(*arguments: Any) -> Tensor:
        return function(*arguments)

    return wrapper


_to, _linear = _decorated(Tensor.to), _decorated(F.linear)


def _interpreted(self: Any, x: Tensor) -> Tensor:
    """As an interpreter of graphs (torch.fx) runs it: each node by the same line of a loop."""
    values: dict[str, Any] = {"x": x.bfloat16(), "w": self.inner.weight, "dtype": torch.bfloat16}
    nodes = [("w", Tensor.to, ("w", "dtype")), *[("x", F.linear, ("x", "w"))] * 3, ("x", Tensor.to, ("x", "dtype"))]
    for name, function, inputs in nodes:
        values[name] = _decorated(function)(*[values[key] for key in inputs])
    return self.head(values["x"].to(x.dtype))


def _listed(self: Any, x: Tensor) -> Tensor:
    """Casts by a helper, and products by another one later."""
    h, weights = x.bfloat16(), [_to(each.weight, torch.bfloat16) for each in (self.inner, self.head)]
    for weight in weights * 3:
        h = _linear(h, weight)
    return h.to(x.dtype)


#: forward → the parts it has; each is pinned as ``inner``
HEALTHY: dict[str, tuple[Forward, Callable[[], nn.Module]]] = {
    "called": (lambda self, x: self.head(self.inner(x)), linear),
    "cast by the user": (
        lambda self, x: self.head(F.linear(x.bfloat16(), self.inner.weight.bfloat16()).to(x.dtype)),
        linear,
    ),
    "cast by a decorated function": (
        lambda self, x: self.head(_linear(x.bfloat16(), _to(self.inner.weight, torch.bfloat16)).to(x.dtype)),
        linear,
    ),
    "interpreted": (_interpreted, linear),
    "cast by a helper": (_listed, linear),
    "added": (lambda self, x: self.head((x + self.inner.weight[0]).to(x.dtype)), linear),
    "a penalty on weights": (lambda self, x: self.head(x) + self.inner.weight.square().mean(), linear),
    "a penalty on gradients": (_penalty, linear),
    "its own hook": (lambda self, x: self.head(self.inner(x)), hooked),
    "spectral_norm, parametrized": (
        lambda self, x: self.head(self.inner(x)),
        lambda: nn.utils.parametrizations.spectral_norm(linear()),
    ),
    "prototypes": (lambda self, x: self.head(x @ self.inner().to(x.dtype).t() * x), Prototypes),
    "a table of queries": (
        lambda self, x: self.head(self.inner.weight.expand(len(x), -1).to(x.dtype)),
        lambda: nn.Embedding(1, WIDTH),
    ),
    "attention": (lambda self, x: self.head(self.inner(x, x, x)[0]), lambda: nn.MultiheadAttention(WIDTH, 2)),
    "LSTM": (lambda self, x: self.head(self.inner(x)[0]), lambda: nn.LSTM(WIDTH, WIDTH)),
    "its layers": (
        lambda self, x: self.head(self.inner[1](self.inner[0](x))),
        lambda: nn.Sequential(linear(), linear()),
    ),
}


@pytest.mark.parametrize(("what", "mode"), [*product(HEALTHY, ["bf16-mixed", "bf16-true"]), ("off", "bf16-mixed")])
def test_what_ordinary_models_do_runs(what: str, mode: str) -> None:
    forward, make = (_off, linear) if what == "off" else HEALTHY[what]
    assert first_step(Net(forward, inner=make(), head=linear()), {"inner": "fp32"}, mode).isfinite().all()


PAST_ITS_PIN: dict[str, tuple[Forward, Callable[[], nn.Module]]] = {
    "a tied table": (lambda self, x: F.linear(x, self.inner.weight), lambda: nn.Embedding(WIDTH, WIDTH)),
    "a layer of one's own": (lambda self, x: x @ self.inner.weight, Shared),
    "a convolution": (lambda self, x: F.conv1d(x[..., None], self.inner.weight), lambda: nn.Conv1d(WIDTH, WIDTH, 1)),
    "a bias": (lambda self, x: F.linear(x, self.head.weight, self.inner.bias), linear),
    "beside another's": (lambda self, x: F.linear(x, torch.cat([self.head.weight, self.inner.weight])), linear),
    "a list": (lambda self, x: x @ self.inner[0], lambda: nn.ParameterList([torch.eye(WIDTH)])),
    "called as well": (lambda self, x: F.linear(self.inner(x), self.inner.weight), linear),
    "on the left": (lambda self, x: torch.mm(self.inner.weight, x.t()), linear),
    "einsum": (lambda self, x: torch.einsum("bi,oi->bo", x, self.inner.weight), linear),
    "WavLM": (_attention, linear),
}


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("what", PAST_ITS_PIN)
def test_a_weight_that_is_computed_with_past_its_pin_is_named(what: str, mode: str) -> None:
    forward, make = PAST_ITS_PIN[what]
    with pytest.raises(PlanError, match=r"inner\.\w+ is pinned to fp32 .* \(\w+, test_first_step.py:\d+\)"):
        first_step(Net(forward, inner=make(), head=linear()), {"inner": "fp32"}, mode)


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_a_decorated_function_of_a_pinned_weight_is_named_too(mode: str) -> None:
    root = Net(lambda self, x: _linear(x, self.inner.weight), inner=linear(), head=linear())
    with pytest.raises(PlanError, match=r"inner\.\w+ is pinned to fp32"):
        first_step(root, {"inner": "fp32"}, mode)


class Passes(TorchDispatchMode):
    """Another mode around an operator, as an audit or a counter of FLOPs is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_weight_past_its_pin_is_named_within_another_dispatch_mode_too() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with Passes():
            return F.linear(x, self.inner.weight)

    with pytest.raises(PlanError, match=r"inner\.\w+ is pinned to fp32"):
        first_step(Net(forward, inner=linear(), head=linear()), {"inner": "fp32"}, "bf16-mixed")


def test_a_parameter_that_is_made_meanwhile_is_not_taken_for_one_that_is_gone() -> None:
    """Temporary parameters of a functional call get the place in memory, and the id, of those before."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(50):
            x = x + 0 * nn.Parameter(x.detach().clone())
        return self.head(self.inner(x))

    assert first_step(Net(forward, inner=linear(), head=linear()), {"inner": "fp32"}, "bf16-mixed").isfinite().all()


def test_variables_of_finished_calls_are_let_go_of_with_the_next_operator() -> None:
    seen = list[Any]()

    def forward(self: Any, x: Tensor) -> Tensor:
        def helper(weight: Tensor) -> Tensor:
            large = torch.ones(1000)
            seen.append(weakref.ref(large))
            return weight.to(torch.bfloat16)

        h = F.linear(x.bfloat16(), helper(self.inner.weight))
        seen.append(seen[0]())
        return self.head(h.to(x.dtype))

    first_step(Net(forward, inner=linear(), head=linear()), {"inner": "fp32"}, "bf16-true")
    assert seen[1] is None


class Recorded(Net):
    """Keeps what a layer gives, as transformers do for ``output_hidden_states``, and reads it later."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: (self.inner(x), self.head(self.seen[0]))[1], inner=linear(), head=linear())
        self.seen: list[Tensor] = []
        own = self.inner.forward
        self.inner.forward = lambda x: (self.seen.append(own(x)), self.seen[-1])[1]


CLASHES: dict[str, Callable[[], nn.Module]] = {
    "recorded": Recorded,
    "looked up": lambda: Net(
        lambda self, x: self.head(F.embedding(torch.arange(4), self.inner.weight)),
        inner=nn.Embedding(4, WIDTH),
        head=linear(),
    ),
}


@pytest.mark.parametrize("what", CLASHES)
def test_what_a_pinned_module_gives_to_a_layer_of_another_dtype_names_the_pin(what: str) -> None:
    with pytest.raises(
        PlanError, match=r"'inner' is pinned to fp32 \('inner'\), and what it gives meets bf16"
    ) as error:
        first_step(CLASHES[what](), {"inner": "fp32"}, "bf16-true")
    assert isinstance(error.value.__cause__, RuntimeError)


def test_an_error_that_no_pin_leads_to_stays_as_it_is() -> None:
    root = Net(lambda self, x: self.head(x.double()) + self.inner(x), inner=linear(), head=linear())
    with pytest.raises(RuntimeError, match="dtype"):
        first_step(root, {"inner": "fp32"}, "bf16-true")


ORDINARY = ("llama", "gpt2", "mixtral", "bert", "t5", "clip", "detr", "whisper", "wav2vec2", "swin")
SETS: list[dict[str, str]] = [{"norms": "fp32"}, {"Linear": "fp32"}, {"Embedding": "fp32"}]


@pytest.mark.parametrize("name", ORDINARY)
def test_models_of_transformers_run_with_ordinary_pins(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch(torch.Generator().manual_seed(0))
    for pins in SETS if name in TEXT else SETS[:2]:
        root = Net(lambda self, x: self.model(**x).loss, model=copy.deepcopy(model))
        assert first_step(root, pins, "bf16-mixed", batch).isfinite()
