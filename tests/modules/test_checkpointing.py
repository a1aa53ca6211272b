"""What is recomputed, counted in FLOPs; and that nothing else changes."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import utils
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import Checkpointing
from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules import checkpointing
from lightning_mp.numerics.dtypes import default_dtype
from support.comparing import same
from support.models import FEATURES
from support.norms import Normed, conv_net, run
from support.oracles import plan_for
from support.pinning import pin, products
from support.running import faults_of, fit

ROWS, WIDTH = 4, 8
#: the FLOPs of one matrix product of a layer: a multiplication and an addition for each
PRODUCT = 2 * ROWS * WIDTH * WIDTH
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


class Block(nn.Module):
    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), *after)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.net(x)


class Net(nn.Module):
    def __init__(self, blocks: int = 2, after: Callable[[], list[nn.Module]] = list) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(*after()) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, gain=0.5)
        return x


def checkpoint(root: nn.Module, **options: Any) -> ExitStack:
    config, faults = Checkpointing(**{"modules": "Block", **options}), Faults()
    modules = checkpointing.select(root, config, faults)
    faults.raise_if_any()
    return checkpointing.apply(root, modules, config)


def flops(root: nn.Module, x: Tensor = X) -> int:
    with FlopCounterMode(display=False) as counter:
        root(x).sum().backward()
    return counter.get_total_flops()


def gradients(root: nn.Module, x: Tensor = X, seed: int = 1) -> dict[str, Tensor]:
    root.zero_grad()
    torch.manual_seed(seed)
    root(x).pow(2).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in root.named_parameters()}


#: two products forward in each of two blocks; backward one for each weight and one for each input but the very first
FORWARD, BACKWARD = 2 * 2, 2 * 2 + 2 * 2 - 1
TWICE = 2  # blocks


def repr_of(value: object) -> str:
    """For test ids: no addresses in them, which differ from process to process."""
    return value.__name__ if callable(value) else str(value)


def with_tanh_at_the_end() -> list[nn.Module]:
    return [nn.Tanh()]


@pytest.mark.parametrize(
    ("after", "options", "recomputed"),
    [
        # Recomputation stops at the last tensor the backward pass needs: the second product's input, not its result.
        (list, {}, TWICE * 1),
        # The tanh at the end needs its own result, and so the second product again.
        (with_tanh_at_the_end, {}, TWICE * 2),
        (with_tanh_at_the_end, {"every": 2}, 1 * 2),
        (with_tanh_at_the_end, {"every": 3}, 1 * 2),
        (with_tanh_at_the_end, {"modules": "blocks.1"}, 1 * 2),
        (with_tanh_at_the_end, {"modules": ("blocks.1", "blocks.0")}, TWICE * 2),
        (with_tanh_at_the_end, {"modules": Block}, TWICE * 2),
        (with_tanh_at_the_end, {"modules": "blocks"}, TWICE * 2),
        # Of nested matches the outermost counts: the block, and in it nothing a second time.
        (with_tanh_at_the_end, {"modules": ("Block", "net", "Linear")}, TWICE * 2),
        # One layer by itself needs only its input, which is what was kept.
        (with_tanh_at_the_end, {"modules": "Linear"}, 0),
        (with_tanh_at_the_end, {"mode": "selective"}, 0),
        (with_tanh_at_the_end, {"mode": "selective", "save_ops": ("tanh",)}, TWICE * 2),
        (with_tanh_at_the_end, {"mode": "selective", "save_ops": ("addmm",)}, 0),
        (with_tanh_at_the_end, {"mode": "selective", "save_ops": ("aten.addmm.default",)}, 0),
        (with_tanh_at_the_end, {"mode": "selective", "save_ops": ("aten::addmm",)}, 0),
        (with_tanh_at_the_end, {"mode": "selective", "save_ops": ("mm", "tanh"), "every": 2}, 1 * 2),
    ],
    ids=repr_of,
)
def test_so_many_are_recomputed(after: Callable[[], list[nn.Module]], options: dict[str, Any], recomputed: int) -> None:
    root = Net(after=after)
    assert flops(root) == (FORWARD + BACKWARD) * PRODUCT
    checkpoint(root, **options)
    assert flops(root) == (FORWARD + BACKWARD + recomputed) * PRODUCT


class Iterates(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layers = how, nn.Sequential(*(Block(nn.Tanh()) for _ in range(2)))
        if how == "deep":
            self.layers = nn.Sequential(nn.ModuleDict({"within": self.layers}))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "called":
            return self.layers(x)
        layers: Any = self.layers[0]["within"] if self.how == "deep" else self.layers
        for layer in (layers[:1], layers[1]) if self.how == "sliced" else layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("how", ["called", "iterated", "sliced", "deep"])
def test_a_container_that_is_never_called_has_what_is_in_it_checkpointed(how: str) -> None:
    plain, root = Iterates(how), Iterates(how)
    applied = checkpoint(root, modules="layers")
    assert flops(root) == (FORWARD + BACKWARD + 2 * TWICE) * PRODUCT
    assert same(gradients(root), gradients(plain))
    applied.close()
    assert [type(each) for each in root.modules()] == [type(each) for each in plain.modules()]


class Stage(nn.Module):
    """A container with a forward of its own, of which code calls another method, or what is in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rest = Block(nn.Tanh()), nn.Sequential(Block(nn.Tanh()))

    def encode(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))

    forward = encode


class CallsAMethod(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, Stage()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "iterated":
            for layer in (self.layers.first, *self.layers.rest):
                x = layer(x)
            return x
        return self.layers.encode(x) if self.how == "method" else self.layers(x)


@pytest.mark.parametrize("how", ["called", "method", "iterated"])
def test_a_container_with_a_forward_that_nobody_calls_has_what_is_in_it_checkpointed(how: str) -> None:
    plain, root = CallsAMethod(how), CallsAMethod(how)
    applied = checkpoint(root, modules="layers")
    # called as a whole the last product of the first block is needed too
    assert flops(root) == (FORWARD + BACKWARD + 2 * TWICE) * PRODUCT
    assert same(gradients(root), gradients(plain))
    applied.close()
    assert [type(each) for each in root.modules()] == [type(each) for each in plain.modules()]


def _patched(how: str) -> nn.Module:
    root = Net(after=with_tanh_at_the_end)
    for block in root.blocks:
        if how == "compiled":
            block.forward = torch.compile(block.forward, backend="eager")
        else:
            block.forward = MethodType(Block.forward, block)
    return root


# dynamo's own, on inputs that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", ["method", "compiled"])
def test_a_forward_that_was_set_on_the_instance_is_recomputed(how: str) -> None:
    root, plain = _patched(how), Net(after=with_tanh_at_the_end)
    checkpoint(root)
    kept = list[Tensor]()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        root(X)
    assert len(kept) == TWICE  # the inputs of the blocks
    assert same(gradients(root), gradients(plain))


def test_python_code_of_a_compiled_forward_runs_in_the_recomputation_too() -> None:
    class Counts(Block):
        calls = 0

        def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
            self.calls += 1
            return super().forward(x, gain=gain)

    root = nn.Sequential(Counts())
    root[0].forward = torch.compile(root[0].forward, backend="eager")
    checkpoint(root, modules="0")
    root(X).sum().backward()
    assert root[0].calls == 2


class Reads(LightningModule):
    """Computes with the weights of a layer that it does not call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.block, self.head = how, nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        block = self.block
        if self.how == "unused" or (self.how == "later" and batch_idx < 2):
            return self.head(batch[0]).mean()
        if self.how == "skipped" and batch_idx < 2:
            return None
        x = nn.functional.linear(batch[0], block.weight, block.bias) if self.how == "read" else block(batch[0])
        return self.head(x).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("how", ["read", "called", "unused", "later", "skipped"])
def test_a_module_that_is_trained_and_never_recomputed_is_said_once(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "counters", defaultdict(Counter))  # of tests that compiled
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Reads(how), plugins=[plan_for("32-true", checkpointing="block")])
    told = [str(each.message) for each in said if "checkpointing has no effect" in str(each.message)]
    assert len(told) == (how == "read")
    if told:
        assert "'block'" in told[0]


def test_a_pattern_that_matches_nothing_that_has_a_forward_is_refused() -> None:
    root = nn.ModuleDict({"scales": nn.ParameterList([torch.ones(2)]), "net": Net()})
    with pytest.raises(PlanError, match="Checkpointing 'scales', which matches no module with a forward"):
        checkpoint(root, modules="scales")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_what_torch_jit_compiled_is_not_checkpointed() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Tanh()))
    root = nn.Sequential(Block(scripted))
    kind, before = type(scripted), root(X)
    checkpoint(root, modules=("Block", "net"))
    assert type(scripted) is kind
    assert torch.equal(root(X), before)
    with pytest.raises(PlanError, match=r"on '0\.net\.3', which torch"):
        checkpoint(nn.Sequential(Block(scripted)), modules="net.3")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_makes_its_parameters_in_its_first_forward_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"on '0\.net\.3', whose parameters do not exist yet"):
        checkpoint(nn.Sequential(Block(nn.LazyLinear(WIDTH))), modules="net.3")


@pytest.mark.parametrize("options", [{}, {"mode": "selective"}, {"every": 2}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_the_same_bit_for_bit_dropout_included(options: dict[str, Any], dropout: float) -> None:
    plain, root = (Net(after=lambda: [nn.Dropout(dropout), nn.Tanh()]) for _ in range(2))
    checkpoint(root, **options)
    assert same(gradients(plain), gradients(root))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recomputation_runs_under_the_autocast_of_the_forward(dtype: torch.dtype) -> None:
    plain, root = (Net(after=with_tanh_at_the_end) for _ in range(2))
    checkpoint(root)
    with torch.autocast("cpu", dtype):
        losses = [module(X).float().pow(2).sum() for module in (plain, root)]
    for loss in losses:
        loss.backward()  # outside autocast, as a trainer does
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), root.parameters(), strict=True)
    )


def test_recomputation_runs_under_the_default_dtype_of_the_forward() -> None:
    """True modes set it for the forward alone, and a backward pass runs after it."""

    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.tensor(2.0)).sin() * torch.ones(())

    root = nn.Sequential(Made())
    checkpoint(root, modules="Made")
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with default_dtype(torch.bfloat16):
        out = root(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("pinned_first", [True, False])
def test_pins_inside_and_around_a_checkpointed_module_hold(pinned_first: bool) -> None:
    root, plain = (Net(after=with_tanh_at_the_end) for _ in range(2))
    spec = {"net.0": "fp32", "blocks.1": "fp32"}
    if pinned_first:
        pin(root, spec)
    applied = checkpoint(root)
    if not pinned_first:
        pin(root, spec)
    pin(plain, spec)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert products(root, X, autocast=bf16) == [fp32, bf16, fp32, fp32]
    with torch.autocast("cpu", bf16):
        assert flops(root) == (FORWARD + BACKWARD + 4) * PRODUCT
        assert same(gradients(root), gradients(plain))
    applied.close()
    assert products(root, X, autocast=bf16) == [fp32, bf16, fp32, fp32], "the pins stay when checkpointing goes"


@pytest.mark.parametrize(
    ("options", "given", "fix"),
    [
        ({"modules": "Blok"}, "checkpointing pattern 'Blok', which matches no module", "'Block'"),
        ({"mode": "selective", "save_ops": ("addm",)}, "save_ops 'addm'", "'addmm'"),
        ({"mode": "selective", "save_ops": ("addmm.nothing",)}, "save_ops 'addmm.nothing'", "addmm"),
        ({"mode": "selective", "save_ops": ("name",)}, "save_ops 'name'", ""),
        ({"mode": "selective", "save_ops": ("_dir",)}, "save_ops '_dir'", ""),
    ],
    ids=str,
)
def test_unknown_patterns_and_operators_are_faults(options: dict[str, Any], given: str, fix: str) -> None:
    (fault,) = faults_of(lambda: checkpoint(Net(), **options))
    assert fault.problem == given
    assert fix in fault.fix


class Average(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        new = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        if self.how == "assigned":
            self.mean = new
        else:
            (self.mean.data if self.how == "data" else self.mean).copy_(new)
        return torch.relu(hidden * (1 + self.mean))


def _linear(wrap: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return wrap(nn.Linear(FEATURES, FEATURES), **options)


def _instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), norm, nn.Flatten(), nn.Linear(FEATURES, FEATURES))


INNER: dict[str, Callable[[], nn.Module]] = {
    "batch norm, cumulative": lambda: nn.Sequential(_linear(nn.Sequential), nn.BatchNorm1d(FEATURES, momentum=None)),
    "instance norm": _instance_norm,
    "spectral norm": lambda: _linear(utils.parametrizations.spectral_norm),
    "spectral norm by hook": lambda: _linear(utils.spectral_norm),
    "in place": lambda: Average("in place"),
    "data": lambda: Average("data"),
    "assigned": lambda: Average("assigned"),
}
NETS = {"batch norms": conv_net} | {
    name: lambda inner=inner: nn.Sequential(nn.Sequential(inner()), nn.Linear(FEATURES, 1))
    for name, inner in INNER.items()
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
@pytest.mark.parametrize("checkpointing", ["net", {"modules": "net", "mode": "selective"}], ids=["full", "selective"])
@pytest.mark.parametrize("net", NETS)
def test_a_run_is_the_one_without(net: str, checkpointing: Any) -> None:
    found = run("single", "32-true", Normed(NETS[net]), checkpointing=checkpointing)
    expected = run("single", "32-true", Normed(NETS[net]))
    assert same(found["tensors"], expected["tensors"])


@pytest.mark.parametrize("options", [{}, {"mode": "selective", "save_ops": ("bmm",)}], ids=["full", "selective"])
def test_a_retained_graph_computes_from_the_buffers_of_the_forward(options: Any) -> None:
    root = nn.Sequential(Average("in place"))
    checkpointing.apply(root, root, Checkpointing(modules="0", **options))
    loss = root(torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in root.parameters()]
    loss.backward()
    assert all(torch.equal(one.grad, 2 * once) for one, once in zip(root.parameters(), first, strict=True))
