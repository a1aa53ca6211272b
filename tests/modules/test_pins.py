"""Which pin covers which module; that it runs in its pin's dtype and stays stored in it, whatever is around it."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

import lightning_mp
from lightning_mp.errors import PlanError
from lightning_mp.modules import checkpointing
from lightning_mp.policy import Checkpointing, Pin
from support.hf import llama, tokens
from support.pinning import Declared, Ran, dtypes_by_name, pin, resolve, stored
from support.running import faults_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_f(x))


NORMS = ("blocks.0.norm", "blocks.1.norm", "norm_f")
MLP = (".mlp", ".mlp.0", ".mlp.1")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {}),
        ({"head": "bf16"}, {"head": "bf16"}),
        ({"norm*": "fp32"}, dict.fromkeys(NORMS, "fp32")),
        ({"LayerNorm": "fp32"}, dict.fromkeys(NORMS, "fp32")),
        ({"blocks.0": "fp32"}, {f"blocks.0{rest}": "fp32" for rest in ("", ".norm", *MLP)}),
        ({"*.1.norm": "fp32", "norm": "bf16"}, {"blocks.0.norm": "bf16", "blocks.1.norm": "fp32"}),
        (
            {"norm": "fp32", "Block": "bf16"},
            dict.fromkeys(NORMS[:2], "fp32") | {f"blocks.{k}{rest}": "bf16" for k in (0, 1) for rest in ("", *MLP)},
        ),
    ],
    ids=str,
)
def test_a_pin_covers_what_it_matches_and_below_and_the_first_wins(spec: Declared, expected: dict[str, str]) -> None:
    assert dtypes_by_name(Blocks(), spec) == expected


def test_a_container_pinned_first_leaves_nothing_to_a_later_pin_below_it() -> None:
    found = resolve(Blocks(), {"Block": "bf16", "norm": "fp32", "head": "fp32"})
    assert found.shadowed == ("norm",)
    assert {m.pin.dtype for m in found.members if m.name.endswith(".norm")} == {"bf16"}


def test_all_patterns_that_match_nothing_are_told_together() -> None:
    problems = [
        fault.problem
        for fault in faults_of(lambda: resolve(Blocks(), {"haed": "fp32", "head": "fp32", "blcks.0": "bf16"}))
    ]
    assert problems == [f"pin {name!r}, which matches no module" for name in ("haed", "blcks.0")]


def test_the_word_norms_is_no_error_in_a_model_without_any() -> None:
    found = resolve(nn.Sequential(nn.Linear(2, 2)), {"norms": "fp32"})
    assert (found.members, found.shadowed) == ((), ())


class Tied(nn.Module):
    """As GPT-2: the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"wte": nn.Embedding(8, 4), "ln": nn.LayerNorm(4)})
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.body["wte"].weight

    def forward(self, ids):  # type: ignore[no-untyped-def]
        return self.lm_head(self.body["ln"](self.body["wte"](ids)))


def test_contradicting_pins_on_a_tied_weight_are_a_fault_that_names_both_places() -> None:
    (fault,) = faults_of(lambda: resolve(Tied(), {"lm_head": "bf16", "wte": "fp32"}))
    assert "body.wte.weight pinned to fp32" in fault.problem
    assert "lm_head.weight pinned to bf16" in fault.problem
    assert "tied" in fault.problem
    assert "untie" in fault.fix


@pytest.mark.parametrize("spec", [{"lm_head": "bf16"}, {"wte": "bf16"}, {"wte": "bf16", "lm_head": "bf16"}], ids=str)
def test_a_pin_on_one_owner_of_a_tied_weight_covers_the_other(spec: Declared) -> None:
    assert dtypes_by_name(Tied(), spec) == {"body.wte": "bf16", "lm_head": "bf16"}


class Shared(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.one = nn.Sequential(shared)
        self.two = nn.Sequential(shared)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.two(self.one(x))


@pytest.mark.parametrize("name", ["one.0", "two.0"])
def test_a_shared_module_may_be_pinned_under_either_of_its_names_and_is_listed_once(name: str) -> None:
    members = resolve(Shared(nn.Linear(4, 4)), {name: "fp32"}).members
    assert [member.pin.dtype for member in members] == ["fp32"]


def test_a_weight_that_the_root_holds_too_cannot_be_pinned() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.weight = self.head.weight

    with pytest.raises(PlanError, match=r"head\.weight, which is tied to the root module's own 'weight'"):
        resolve(Root(), {"head": "fp32"})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("pattern", ["0", "0.0"])
def test_a_pin_that_covers_what_torch_jit_compiled_is_refused_by_its_name(pattern: str) -> None:
    root = nn.Sequential(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2)))))
    assert [fault.problem for fault in faults_of(lambda: resolve(root, {pattern: "fp32"}))] == [
        f"pin {pattern!r} on '0.0', which torch.jit compiled"
    ]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("pattern", ["0", "Lazy*", "norms", "net"])
def test_a_pin_waits_for_the_parameters_that_a_first_batch_makes(pattern: str) -> None:
    root = nn.ModuleDict({"net": nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())})
    with pytest.raises(PlanError, match=r"parameters do not exist yet. Run one batch through it first"):
        resolve(root, {pattern: "fp32"})
    root["net"](torch.ones(2, 3))
    assert resolve(root, {pattern.replace("Lazy", ""): "fp32"}).members


class Probe(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.met = (input.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu"))
        return super().forward(input)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Probe(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = Probe(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def autocast(dtype: torch.dtype = BF16) -> torch.autocast:
    return torch.autocast("cpu", dtype, cache_enabled=False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_pinned_module_is_stored_and_runs_in_its_dtype_outside_autocast(dtype: str) -> None:
    root, wanted = pin(Net(), {"head": dtype}), {"fp32": FP32, "bf16": BF16, "fp16": FP16}[dtype]
    with autocast():
        logits = root(X)
    assert root.head.met == (wanted, wanted, False)
    assert root.body.met == (FP32, FP32, True)
    # Its own dtype, which autocast casts; but the other half format meets autocast's, and functions mix no two.
    assert logits.dtype == (FP32 if dtype == "fp16" else wanted)
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize(
    ("mode", "output", "came_in", "comes_out"),
    [
        ("bf16-mixed", None, BF16, FP32), ("bf16-mixed", "pin", BF16, FP32), ("bf16-mixed", "input", BF16, BF16),
        ("bf16-mixed", "input", FP32, FP32), ("bf16-mixed", "fp16", BF16, FP16),
        ("bf16-mixed", torch.bfloat16, FP32, BF16), ("bf16-true", None, BF16, BF16), ("bf16-true", None, FP16, FP16),
        ("bf16-true", "pin", BF16, FP32), ("bf16-true", "input", BF16, BF16), ("16-true", "bf16", FP16, BF16),
    ],
)  # fmt: skip
def test_output_says_otherwise(mode: str, output: Any, came_in: torch.dtype, comes_out: torch.dtype) -> None:
    root = pin(Net(), [Pin("norm", "fp32", output=output)], mode=mode)
    with Ran("native_layer_norm") as ran:
        assert root.norm(X.to(came_in)).dtype == comes_out
    assert ran.dtypes == [FP32]


@pytest.mark.parametrize(("mode", "expected"), [("bf16-true", BF16), ("16-true", FP16), ("bf16-mixed", FP32)])
def test_without_floating_inputs_the_compute_dtype_is_handed_on(mode: str, expected: torch.dtype) -> None:
    root = pin(nn.Sequential(nn.Embedding(8, 4)), {"Embedding": "fp32"}, mode=mode)
    assert root[0].weight.dtype == FP32
    assert root(torch.tensor([1, 2])).dtype == expected


@pytest.mark.parametrize("inner", ["norm", "table"])
def test_code_between_modules_of_a_pinned_block_sees_the_blocks_dtype(inner: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            self.met = (self.norm(x) if inner == "norm" else self.table(ids)).dtype
            return x

    root = pin(nn.ModuleDict({"block": Block()}), {inner: "fp32", "block": "bf16"})
    with autocast(FP16):
        root["block"](X, torch.tensor([1]))
    assert root["block"].met == BF16


class Iterates(nn.Module):
    """Never calls its container, as transformers' ResNet."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Residual() for _ in range(depth)))
        self.nested = nn.ModuleDict({"a": nn.Sequential(Residual(), nn.Softmax(-1))})
        self.head = Probe(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.nested["a"][1](self.nested["a"][0](x))
        return self.head(self.layers[-1](self.layers[:1](x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Probe(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.met = torch.softmax(x, -1).dtype
        return x + self.inner(x)


@pytest.mark.parametrize(
    ("mode", "dtype", "head"),
    [("bf16-true", "fp32", BF16), ("16-true", "fp32", FP16), ("bf16-mixed", "fp32", BF16), ("bf16-true", "fp16", BF16)],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_pin_on_a_container_covers_what_is_in_it(
    mode: str, dtype: str, head: torch.dtype, checkpointed: bool
) -> None:
    root = pin(Iterates(), {"layers": dtype, "nested": dtype}, mode=mode)
    if checkpointed:
        checkpointing.apply(root, [*root.layers], Checkpointing(modules="*"))
    wanted = {"fp32": FP32, "fp16": FP16}[dtype]
    for _ in range(2):
        with Ran("addmm") as ran, torch.autocast("cpu", BF16, enabled=mode.endswith("mixed")):
            loss = root(X.to(FP32 if mode.endswith("mixed") else head)).float().sum()
        loss.backward()
        assert ran.dtypes == [wanted] * 5 + [head]
        assert [layer.met for layer in root.layers] == [wanted] * 2
    with torch.autocast("cpu", BF16, enabled=mode.endswith("mixed")):
        called = root.layers(X.to(FP32 if mode.endswith("mixed") else head))
    assert called.dtype == (FP32 if mode.endswith("mixed") else head)


def test_a_module_recomputed_alone_crosses_no_border() -> None:
    plain, root = (nn.Sequential(nn.Sequential(Residual(), Residual())) for _ in range(2))
    root.load_state_dict(plain.state_dict())
    pin(root, {"0": "fp32"}, mode="bf16-true")
    root[0][0](X.to(BF16))  # by hand, before
    checkpointing.apply(root, [*root[0]], Checkpointing(modules="*"))
    plain(X.to(BF16).float()).to(BF16).float().sum().backward()
    root(X.to(BF16)).float().sum().backward()
    for one, other in zip(root.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Concatenates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return torch.cat((hidden, self.norm(hidden)), -1)


@pytest.mark.parametrize(("pinned", "run"), [("fp16", BF16), ("bf16", FP16)])
def test_what_is_pinned_to_the_other_half_format_can_be_concatenated(pinned: str, run: torch.dtype) -> None:
    root = pin(Concatenates(), {"norms": pinned}, mode="bf16-mixed" if run is BF16 else "16-mixed")
    with autocast(run):
        assert root(X).dtype == FP32


@pytest.mark.parametrize(
    ("lowest", "mask_dtype"), [(torch.finfo(FP32).min, FP32), (-1e9, FP32), (torch.finfo(BF16).min, BF16)], ids=str
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_mask_stays_finite_at_the_border_inf_stays_inf(lowest: float, dtype: str, mask_dtype: torch.dtype) -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.mask = mask
            return torch.softmax(x @ x.mT + mask, -1)

    root = pin(nn.ModuleDict({"a": Takes()}), {"a": dtype})
    mask = torch.full((3, 3), lowest).to(mask_dtype)
    assert root["a"](X, mask=mask).isfinite().all(), "also in a row that is masked as a whole"
    root["a"](X, mask=torch.tensor([[0.0, -torch.inf, torch.nan]]))
    assert root["a"].mask.isinf().tolist() == [[False, True, False]]
    assert root["a"].mask.isnan().tolist() == [[False, False, True]]
    overflows = torch.full((3, 3), 3.4e38, requires_grad=True)
    root["a"](X, overflows)
    assert root["a"].mask.isinf().all(), "an activation that overflows is seen to"


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(len(x)) * 1.0


def test_what_a_pinned_module_makes_is_in_the_pins_dtype() -> None:
    root = nn.Sequential(Positions())
    plan = lightning_mp.MixedPrecisionPlan("bf16-true", pins=[Pin("0", "fp32", output="pin")])
    plan.convert_module(root)
    with plan.forward_context():
        out = root(torch.zeros(600, dtype=BF16))
        assert torch.get_default_dtype() == BF16
    assert torch.equal(out, torch.arange(600.0))


def test_keyword_and_nested_inputs_are_cast_and_others_are_not() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, *, pair: Any, mask: Tensor, flag: object) -> Any:
            self.met = [x.dtype, pair["a"][0].dtype, mask.dtype, flag]
            return {"x": x, "ids": mask}

    root = pin(nn.ModuleDict({"m": Takes()}), [Pin("m", "bf16", output="fp32")])
    flag = object()
    out = root["m"](X, pair={"a": (X,)}, mask=torch.ones(2, dtype=torch.bool), flag=flag)
    assert root["m"].met == [BF16, BF16, torch.bool, flag]
    assert (out["x"].dtype, out["ids"].dtype) == (FP32, torch.bool)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to(dtype)": lambda m: m.to(FP16), "to(tensor)": lambda m: m.to(torch.zeros(1, dtype=FP16)),
    "there and back": lambda m: m.half().bfloat16().double().float(), "type": lambda m: m.type(FP16),
    "share_memory": lambda m: m.share_memory(), "to('cpu')": lambda m: m.to("cpu"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-true"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_no_move_changes_a_bit_of_a_pinned_weight_or_gradient(move: Callable[[nn.Module], object], mode: str) -> None:
    """Complaint 4: HalfPrecision's own ``.to``, Fabric's, or a user's must not take a pin's dtype."""
    root = pin(Net(), {"norm": "bf16", "head": "fp32"}, mode=mode)
    root(X.to(root.body.weight.dtype)).sum().backward()
    before = {name: (p, p.detach().clone(), p.grad.clone()) for name, p in root.named_parameters()}
    move(root)
    for name, (parameter, value, gradient) in before.items():
        if not name.startswith("body"):
            assert torch.equal(parameter.detach(), value), name
            assert torch.equal(parameter.grad, gradient), name
            assert dict(root.named_parameters())[name] is parameter, name
    assert stored(root)["head.weight"] == FP32
    assert stored(root)["norm.weight"] == BF16


def test_names_classes_parameters_and_representation_stay() -> None:
    plain = Net()
    names, texts = list(plain.state_dict()), (repr(plain), type(plain.head).__name__, type(plain.head).__module__)
    parameters = {name: id(parameter) for name, parameter in plain.named_parameters()}
    signature = inspect.signature(plain.head.forward)
    root = pin(plain, {"*": "bf16"})
    assert inspect.signature(root.head.forward) == signature, "transformers' generate looks at it"
    assert list(root.state_dict()) == names
    assert (repr(root), type(root.head).__name__, type(root.head).__module__) == texts
    assert isinstance(root.head, Probe)
    assert {name: id(parameter) for name, parameter in root.named_parameters()} == parameters


@pytest.mark.parametrize(
    "travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_a_copy_is_pinned_as_the_original(travel: Callable[[nn.Module], nn.Module]) -> None:
    root = pin(Net(), {"norm": "fp32", "head": "fp32"}, mode="bf16-true")
    copied = travel(root).half()
    assert stored(copied)["head.weight"] == FP32
    assert type(copied.head) is type(root.head)
    x = X.to(BF16)
    root.to(FP16)
    assert torch.equal(copied(x.half()), root(x.half()))


def test_unpin_gives_the_plain_classes_back() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    pin(root, {"1": "fp32", "Linear": "bf16"})
    lightning_mp.unpin(root)
    assert [type(module) for module in root] == [nn.Linear, nn.LayerNorm, nn.Linear]
    assert [module.weight.dtype for module in root] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("mode", "spec"),
    [
        ("bf16-mixed", {"self_attn": "bf16"}),
        ("16-mixed", {"self_attn": "bf16"}),
        ("bf16-mixed", {"self_attn": "fp16"}),
        ("bf16-mixed", {"q_proj": "fp16", "k_proj": "fp16"}),
        ("16-mixed", {"q_proj": "bf16"}),
    ],
    ids=str,
)
def test_a_left_padded_batch_trains_with_half_pins_in_eager_attention(mode: str, spec: dict[str, str]) -> None:
    model = llama()
    model.set_attn_implementation("eager")
    pin(model, spec, mode=mode)
    mask = torch.ones_like(tokens())
    mask[0, :3] = 0
    with autocast(FP16 if mode == "16-mixed" else BF16):
        loss = model(input_ids=tokens(), attention_mask=mask, labels=tokens()).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("pattern", ["decoder", "word_embeddings", "embeddings"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_bias_shared_with_a_head_does_not_tie_the_head_to_the_decoder_in_it(kind: str, pattern: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    small |= {"vocab_size": 32, "max_position_embeddings": 16}
    make = {
        "bert": lambda: BertForMaskedLM(BertConfig(**small)),
        "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**small)),
    }
    model = pin(make[kind](), {pattern: "fp32"}, mode="bf16-true")
    assert model(input_ids=tokens() % 32).logits.isfinite().all()
    found = stored(model)
    dense = next(name for name in found if name.endswith(("lm_head.dense.weight", "transform.dense.weight")))
    assert found[dense] == BF16
    assert found[next(name for name in found if "word_embeddings" in name)] == FP32
