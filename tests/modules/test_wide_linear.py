"""``Pin(..., accumulate="fp32")``: half operands, the sum and the result in fp32, the half product's gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_mp import FP8, MixedPrecisionPlan, Pin
from lightning_mp.callbacks import DtypePinning, PrecisionAudit
from lightning_mp.compat.lightning import LightningModule
from lightning_mp.modules.wide_linear import WideProduct
from support.models import Regression
from support.pinning import pin, resolve, stored
from support.running import faults_of, fit

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS, IN, OUT = 96, 256, 48
HALVES = {"bf16": BF16, "fp16": FP16}


class Net(nn.Module):
    """A table, a layer, and a head, which may be tied to the table."""

    def __init__(self, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(WORDS, IN), nn.Linear(IN, IN)
        self.head = nn.Linear(IN, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(ids))))


IDS = torch.arange(24).reshape(2, 12)


def wide(pattern: str = "head", dtype: str = "bf16") -> list[Pin]:
    return [Pin(pattern, dtype, accumulate="fp32")]


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).double()


@pytest.mark.parametrize("dtype", HALVES)
def test_the_result_is_off_by_the_sum_in_fp32_alone(dtype: str) -> None:
    layer, rows = nn.Linear(IN, OUT), torch.randn(64, IN)
    half = HALVES[dtype]
    x, w, b = (rounded(one, half) for one in (rows, layer.weight, layer.bias))
    exact, size = x @ w.t() + b, x.abs() @ w.abs().t() + b.abs()
    narrow = functional.linear(*(one.detach().to(half) for one in (rows, layer.weight, layer.bias)))
    with torch.autocast("cpu", half):
        found = pin(layer_in(layer), wide(dtype=dtype))(rows)
    assert found.dtype == FP32
    off = (found.double() - exact).abs()
    assert bool((off <= IN * 2.0**-24 * size).all())  # Higham, section 3.1, IN products and a bias
    # A rounded result is off by up to half a unit, evenly spread: the root mean square is a third of the largest.
    # Random signs keep the sum's own error to sqrt(IN) roundings, of numbers of the result's size.
    expected = torch.finfo(half).eps / 2 / 3**0.5 / (IN**0.5 * 2.0**-24)
    gained = (narrow.double() - exact).pow(2).mean() / off.pow(2).mean()
    assert gained**0.5 > expected


def layer_in(layer: nn.Module) -> nn.Module:
    root = nn.Sequential()
    root.add_module("head", copy.deepcopy(layer))
    return root


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(IN,), (5, IN), (2, 3, IN), (0, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_the_half_products_to_the_last_bit(bias: bool, shape: tuple[int, ...], dtype: str) -> None:
    torch.manual_seed(0)
    layer, rows, half = nn.Linear(IN, OUT, bias=bias), torch.randn(shape), HALVES[dtype]
    outer = torch.randn(*shape[:-1], OUT)
    results = []
    for root in (layer_in(layer), pin(layer_in(layer), wide(dtype=dtype))):
        given = rows.clone().requires_grad_()
        with torch.autocast("cpu", half):
            output = root(given)
        output.float().backward(outer)
        results.append([given.grad, *(parameter.grad for parameter in root.parameters())])
    assert output.shape == outer.shape
    assert all(map(torch.equal, *results))


def test_only_what_is_trained_gets_a_gradient() -> None:
    root = pin(layer_in(nn.Linear(IN, OUT)), wide())
    root.requires_grad_(False)
    rows = torch.randn(3, IN, requires_grad=True)
    root(rows).sum().backward()
    assert rows.grad is not None
    assert [parameter.grad for parameter in root.parameters()] == [None, None]
    assert not root(rows.detach()).requires_grad


@pytest.mark.parametrize(
    ("mode", "storage"), [("bf16-mixed", FP32), ("16-mixed", FP32), ("bf16-true", BF16), ("16-true", FP16)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_stay_where_the_mode_stores_them_and_ties_hold(tied: bool, mode: str, storage: torch.dtype) -> None:
    root = pin(Net(tied), wide(), mode=mode)
    assert set(stored(root).values()) == {storage}
    assert (root.head.weight is root.table.weight) is tied
    with torch.autocast("cpu", FP16 if mode == "16-mixed" else BF16, enabled=mode.endswith("mixed")):
        logits = root(IDS)
    assert logits.dtype == FP32
    root.to(torch.float64)  # a pin that stores in its dtype would keep it
    assert set(stored(root).values()) == {torch.float64}


def test_the_table_that_a_head_is_tied_to_may_be_pinned_to_fp32() -> None:
    root = pin(Net(tied=True), [Pin("table", "fp32"), *wide()], mode="bf16-true")
    assert root.head.weight is root.table.weight
    assert (root.table.weight.dtype, root.body.weight.dtype) == (FP32, BF16)
    hidden = torch.randn(4, IN, dtype=BF16)
    expected = functional.linear(hidden.float(), root.head.weight.bfloat16().float(), root.head.bias.bfloat16().float())
    assert torch.equal(root.head(hidden), expected)


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


REFUSED = {
    "a norm": nn.LayerNorm(4), "a container": nn.Sequential(nn.Linear(4, 4)), "a forward of its own": OwnForward(4, 4),
    "a patched forward": _patched(), "a convolution": nn.Conv1d(4, 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_linear_is_refused_with_its_class(kind: str) -> None:
    root = nn.Sequential()
    root.add_module("head", REFUSED[kind])
    (fault,) = faults_of(lambda: resolve(root, wide()))
    assert fault.problem == f"pin 'head' with accumulate='fp32' on 'head', a {type(REFUSED[kind]).__name__}"
    assert fault.allowed == "a plain nn.Linear"


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # dynamo does so itself
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_in_one_graph(backend: str) -> None:
    root = pin(Net(), wide())
    compiled = torch.compile(root, backend=backend, fullgraph=True)
    with torch.autocast("cpu", BF16):
        one, other = root(IDS), compiled(IDS)
    assert torch.equal(one, other)
    gradients = [torch.autograd.grad(logits.sin().sum(), list(root.parameters())) for logits in (one, other)]
    assert all(map(torch.equal, *gradients))


class Trained(LightningModule):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.net = Net(tied, bias=False)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.net(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        self.losses.append(loss.detach())
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader([IDS + shift for shift in range(6)], batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Oracle(nn.Module):
    """The head as one writes it by hand: products of upcast operands, whose gradients are the half product's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x, w = hidden.bfloat16(), self.weight.bfloat16()
            half = functional.linear(x, w)
            exact = functional.linear(x.float(), w.float())
            return half.float() + (exact - half.float()).detach()


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true", "32-true"])
def test_a_run_is_the_plain_loop_that_multiplies_upcast_operands(mode: str) -> None:
    module, plain = Trained(), Trained()
    plan = MixedPrecisionPlan(mode, pins=wide("net.head"))
    audit = PrecisionAudit(on_mismatch="raise")
    fit(module, data=module.train_dataloader(), plugins=[plan], callbacks=[audit], max_epochs=1)
    if mode == "bf16-true":
        plain.to(BF16)
    plain.net.head = Oracle(plain.net.head)  # type: ignore[assignment]
    optimizer: Any = plain.configure_optimizers()
    for batch in plain.train_dataloader():
        with torch.autocast("cpu", BF16, enabled=mode == "bf16-mixed"):
            loss = plain.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # half + (exact - half) rounds in fp32: two units of the result's last place
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(plain.losses), rtol=4 * 2.0**-23, atol=0.0)
    (head,) = (row for row in audit.rows if row.module == "net.head")
    assert (head.declared, head.output) == ("bf16", "fp32")
    assert head.param == ("bf16" if mode == "bf16-true" else "fp32")


def test_stock_precision_has_it_by_the_callback() -> None:
    module, audit = Regression(), PrecisionAudit(on_mismatch="raise")
    fit(module, precision="bf16-mixed", callbacks=[DtypePinning(wide("net.0")), audit])
    assert audit.rows[0].output == "fp32"
    assert type(module.net[0]) is nn.Linear


def test_fp8_leaves_it_as_any_pinned_layer() -> None:
    plan = MixedPrecisionPlan("fp8-mixed", fp8=FP8(small="convert", skip=(), emulate=True), pins=wide("net.head"))
    module = Trained(tied=False)
    fit(module, data=module.train_dataloader(), plugins=[plan], max_steps=1)
    assert {layer.name: layer.reason for layer in plan.fp8_layers} == {"net.body": None, "net.head": "pinned"}


def test_the_product_may_be_differentiated_twice() -> None:
    x, w = (torch.randn(4, 4, dtype=BF16, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(WideProduct.apply(x, w, None).pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().pow(2).sum(), w)
    assert bool(second.isfinite().all())
