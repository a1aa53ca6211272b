"""What every mode owes whatever it is called, what ``auto`` chooses, and what becomes of a half model."""

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

import lightning_mp
from lightning_mp import MixedPrecisionPlan
from lightning_mp.plan.side_run import output_in
from support.comparing import same
from support.models import HIDDEN, Regression, batches
from support.norms import Normed, run
from support.oracles import MODES, plan_for, stock_for
from support.running import fit, trainer
from support.traces import lightning_says

# peft's and torchao's, about merging adapters
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
COMPUTED = {"32-true": FP32, "bf16-mixed": BF16, "16-mixed": FP16, "bf16-true": BF16, "16-true": FP16}
every_mode = pytest.mark.parametrize("mode", MODES)


class Evaluated(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.met: dict[str, torch.dtype] = {}
        self.results: dict[str, float] = {}

    def _evaluate(self, stage: str, batch: Any) -> None:
        self.met[stage] = self.net(batch[0]).dtype
        self.results[stage] = float(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._evaluate("predict", batch)
        return self.net(batch[0])


@every_mode
def test_every_stage_runs_in_the_same_compute_dtype(mode: str) -> None:
    module = Evaluated()
    runner = trainer(plugins=[plan_for(mode)], num_sanity_val_steps=0)
    runner.fit(module, batches(), batches())
    runner.validate(module, batches(), verbose=False)
    runner.test(module, batches(), verbose=False)
    runner.predict(module, batches())
    computed = COMPUTED[mode]
    assert module.met == {"validate": computed, "test": computed, "predict": computed}
    assert module.results["validate"] == module.results["test"] == module.results["predict"]


class Casting(Regression):
    """Casts what it is given to ``self.dtype``, as most code that writes it does."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        self.seen = set[Any]()

    def loss(self, batch: Any) -> Tensor:
        self.seen.add(self.dtype)
        x, y = batch
        return (self.net(x.double().to(self.dtype)).float() - y.float()).pow(2).mean()


@pytest.mark.parametrize("half", [False, True])
@every_mode
def test_self_dtype_is_that_of_the_parameters(mode: str, half: bool) -> None:
    module = Casting().half() if half else Casting()
    fit(module, plugins=[plan_for(mode)])
    stored = next(module.parameters()).dtype
    assert module.seen == {stored}
    assert module.dtype == stored == (COMPUTED[mode] if mode.endswith("true") else FP32)


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "bf16-true"])
def test_code_that_reads_self_dtype_trains_as_stock_and_leaves_what_stock_leaves(mode: str) -> None:
    ours, theirs = Casting(), Casting()
    fit(ours, plugins=[plan_for(mode)])
    fit(theirs, **stock_for(mode))
    assert ours.losses == theirs.losses
    assert (ours.seen, ours.dtype) == (theirs.seen, theirs.dtype)


def test_self_dtype_of_a_module_in_float64_stays_where_its_parameters_stay() -> None:
    module = Casting().double()
    fit(module, plugins=[plan_for("32-true")])
    assert module.dtype == next(module.parameters()).dtype == torch.float64


def test_self_dtype_of_an_inner_lightning_module_is_that_of_its_pin() -> None:
    module = Casting()
    module.teacher, module.student = Casting(), Casting()
    plan_for("bf16-true", pins={"teacher": "fp32"}).apply(module)
    assert (module.dtype, module.student.dtype, module.teacher.dtype) == (BF16, BF16, FP32)


class Masked(Regression):
    """An encoder over padded rows, evaluated as it is trained: nothing is dropped."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.fails, self.met = nn.TransformerEncoder(layer, 1), fails, list[Any]()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        rows = self.net[0](x).view(len(x), 2, 16)
        mask = torch.tensor([[False, index % 2 == 0] for index in range(len(x))])
        rows = self.encoder(rows, src_key_padding_mask=mask)
        self.met.append((rows.detach().clone(), torch.backends.mha.get_fastpath_enabled()))
        return (self.net[1:](rows.flatten(1)).float() - y).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails:
            raise KeyError("planned")
        self.loss(batch)
        evaluated = self.met[-1]
        with torch.enable_grad():
            self.train().loss(batch)
        self.eval()
        assert torch.equal(evaluated[0], self.met[-1][0])

    test_step = validation_step


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_a_masked_encoder_is_evaluated_as_it_is_trained(mode: str, fails: bool) -> None:
    """torch's fast path ignores autocast on a CPU, and ends in an error of dtypes where rows are masked."""
    module = Masked(fails)
    runner = trainer(plugins=[plan_for(mode)], limit_val_batches=2)
    if fails:
        with pytest.raises(KeyError, match="planned"):
            runner.fit(module, batches(), batches())
    else:
        runner.fit(module, batches(), batches())
        runner.test(module, batches(), verbose=False)
        assert not any(fast for _, fast in module.met)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_masked_encoder_runs_under_autocast_outside_of_a_run_too() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    rows, mask = torch.randn(2, 3, 16), torch.tensor([[False, False, True]] * 2)
    with torch.no_grad():
        batch = {"src": rows, "src_key_padding_mask": mask}
        output = output_in(encoder, batch, torch.device("cpu"), autocast="bf16", storage=None)
    assert output.shape == rows.shape
    assert torch.backends.mha.get_fastpath_enabled()


class Buffered(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(HIDDEN))

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("mode", "buffer_dtype", "expected"),
    [
        ("16-mixed", None, FP32), ("bf16-true", None, BF16), ("16-true", None, FP16), ("bf16-true", "fp32", FP32),
        ("16-true", "fp32", FP32),
    ],
)  # fmt: skip
def test_buffers_follow_weights_or_buffer_dtype(mode: str, buffer_dtype: str | None, expected: torch.dtype) -> None:
    module = Buffered()
    plan = plan_for(mode, buffer_dtype=buffer_dtype)
    trainer(plugins=[plan]).validate(module, batches(), verbose=False)
    norm = module.net[1]
    assert norm.running_mean.dtype == norm.running_var.dtype == expected
    assert norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(("mode", "kept"), [("16-true", False), ("16-mixed", True)])
def test_16_true_divides_gradients_in_fp16_and_says_so(mode: str, kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Under 2**-14 they lose bits, under 2**-25 they are 0, however large the scale was in the backward pass."""
    true = torch.tensor([1.2345e-3, 1.2345e-6, 2e-8])

    class Small(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.zeros(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx).float() + (self.small.float() * true).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = self.small.grad.float()

    module = Small()
    with caplog.at_level(logging.INFO):
        fit(module, plugins=[plan_for(mode)], max_steps=1)
    error = (module.seen / true - 1).abs().tolist()
    assert error[0] < 2**-10
    assert (error[1] < 2**-10, error[2] < 2**-10) == (kept, kept)
    assert (module.seen[2] == 0).item() is not kept
    said = [record.getMessage() for record in caplog.records if "divides gradients" in record.getMessage()]
    assert (len(said) == 1, all(len(line) <= 160 for line in said)) == (not kept, True)


def test_auto_on_a_small_model_and_a_cpu_is_fp32_and_the_reason_is_logged() -> None:
    module, plan, oracle = Regression(), MixedPrecisionPlan("auto"), Regression()
    assert plan.precision == "auto"
    with lightning_says() as lines:
        fit(module, plugins=[plan])
    assert plan.precision == plan.policy.precision == "32-true"
    (said,) = (line for line in lines if "'auto' is '32-true'" in line)
    assert "below 100M" in said
    fit(oracle, precision="32-true")
    assert module.losses == oracle.losses
    assert plan.state_dict()["policy"]["precision"] == "auto"


MADE = {"half": nn.Module.half, "bfloat16": nn.Module.bfloat16}
MASTERS = ("32-true", "bf16-mixed", "16-mixed")


def _made(how: str, module: nn.Module, back: bool = False) -> None:
    MADE[how](module)
    if back:
        module.float()


@pytest.mark.parametrize("pins", [None, {"BatchNorm1d": "fp32"}])
@pytest.mark.parametrize("mode", MASTERS)
@pytest.mark.parametrize("how", MADE)
def test_it_trains_as_one_that_was_made_fp32_again(how: str, mode: str, pins: Any) -> None:
    found, expected = (
        run("single", mode, Normed(prepare=partial(_made, how, back=b)), pins=pins) for b in (False, True)
    )
    assert same(found, expected)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.inner = nn.Module()  # as a rotary embedding: without parameters
        kinds = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool
        for kind in kinds:
            self.inner.register_buffer(f"b_{str(kind)[6:]}", torch.ones(2).to(kind))


@pytest.mark.parametrize("mode", MASTERS)
def test_buffers_of_another_dtype_than_the_weights_stay_what_they_were_made(mode: str) -> None:
    MixedPrecisionPlan(mode).apply(odd := Odd())
    assert odd.weight.dtype == torch.float32
    found = {name[2:]: str(tensor.dtype)[6:] for name, tensor in odd.inner.named_buffers()}
    assert found.pop("bfloat16") == "float32"
    assert all(name == dtype for name, dtype in found.items())


WIDTH = 64


def _fp8_linear(dtype: torch.dtype) -> nn.Module:
    """transformers' own layer; its kernel needs a GPU, so that the product is written out here."""
    base = importlib.import_module("transformers.integrations.finegrained_fp8").FP8Linear

    class FP8Linear(base):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.float() if self.weight.element_size() > 1 else self.weight.float() * self.scale()
            return F.linear(x, weight.to(x.dtype)) + self.bias

        def scale(self) -> Tensor:
            return self.weight_scale_inv.repeat_interleave(16, 0).repeat_interleave(16, 1)

    layer = FP8Linear(WIDTH, WIDTH, block_size=(16, 16), has_bias=True)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(WIDTH, WIDTH).mul(448 / 4).clamp(-448, 448))
        layer.weight_scale_inv.fill_(4 / 448 / WIDTH**0.5)
        layer.bias.copy_(torch.randn(WIDTH))
        layer.bias.data = layer.bias.data.to(dtype)
    return layer


def _four_bits(dtype: torch.dtype) -> nn.Module:
    bnb = importlib.import_module("bitsandbytes")
    storage = torch.bfloat16  # FSDP-QLoRA's: packed weights that look like bfloat16 ones
    layer = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=storage)
    layer.bias.data = layer.bias.data.to(dtype)
    return layer.to("cpu")


def _torchao(dtype: torch.dtype) -> nn.Module:
    ao = importlib.import_module("torchao.quantization")
    layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    ao.quantize_(layer, ao.Int8WeightOnlyConfig())
    return layer


LAYERS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "FP8Linear": _fp8_linear,
    "Linear4bit": _four_bits,
    "int8 weight only": _torchao,
}


class Adapted(Regression):
    def __init__(self, make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = make(dtype), make(dtype)
        net = nn.Sequential(nn.Linear(16, WIDTH), layers[0], nn.LayerNorm(WIDTH), layers[1], nn.Linear(WIDTH, 1))
        net.requires_grad_(False)
        config = LoraConfig(r=4, target_modules=["1", "3"], init_lora_weights=False)
        self.net = inject_adapter_in_model(config, net)
        self.net[4].requires_grad_(True)
        for name, parameter in self.net.named_parameters():
            if "lora_" in name:  # peft makes them in the dtype of the packed weight, and get_peft_model casts them
                parameter.data = torch.randn_like(parameter, dtype=torch.float32) / 8

    def quantized(self) -> dict[str, tuple[torch.dtype, bytes]]:
        found = {}
        for name, tensor in self.net.named_parameters():
            if "base_layer" in name and "bias" not in name:
                raw = tensor.data.to_local() if isinstance(tensor, DTensor) else tensor.data
                while hasattr(raw, "__tensor_flatten__"):
                    raw = getattr(raw, raw.__tensor_flatten__()[0][0])
                raw = raw.contiguous().view(-1)  # a scale may be a single number
                found[name] = tensor.dtype, raw.view(torch.uint8).numpy().tobytes()
        return found


def trained(layer: str, mode: str, stock: bool, **arguments: Any) -> list[float]:
    """The losses of a fit in which nothing quantized changed."""
    model = Adapted(LAYERS[layer])
    before = model.quantized()
    assert before
    fit(model, **(stock_for(mode) if stock else arguments))
    assert model.quantized() == before
    assert model.losses[-1] < model.losses[0]
    return model.losses


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_it_trains_as_stock(layer: str, mode: str) -> None:
    assert trained(layer, mode, False, plugins=[plan_for(mode)]) == trained(layer, mode, True)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_true_modes_leave_it(layer: str) -> None:
    trained(layer, "bf16-true", False, plugins=[plan_for("bf16-true")])


@pytest.mark.parametrize("layer", LAYERS)
def test_audit_and_doctor_take_it_as_it_is(layer: str) -> None:
    model, plan = Adapted(LAYERS[layer]), MixedPrecisionPlan("bf16-mixed")
    findings = lightning_mp.doctor(model, plan, "ddp", {"devices": 2})
    assert not [finding for finding in findings if "base_layer" in str(finding.where)]
    plan.convert_module(model.net)
    report = lightning_mp.audit(model.net)
    assert report.ok, report


class Marked(nn.Parameter):
    """A class by which some training scripts tell parameters apart."""


class Int8Params(nn.Parameter):
    """A parameter that bitsandbytes quantizes when it is moved to a GPU."""


def _owner(**tensors: tuple[str, torch.dtype]) -> nn.Module:
    """Owns tensors of these names: trained or frozen parameters of a class, and ``buffer``s."""
    owner = nn.Module()
    for name, (kind, dtype) in tensors.items():
        tensor = torch.ones((4,) if "scale" in name and "scales" not in name else (4, 4)).to(dtype)
        if kind == "buffer":
            owner.register_buffer(name, tensor)
        else:
            parameter_class = {"marked": Marked, "frozen mark": Marked, "frozen Int8Params": Int8Params}
            trained = kind in ("trained", "marked")
            made = parameter_class.get(kind, nn.Parameter)(tensor, requires_grad=trained)
            owner.register_parameter(name, made)
    return owner


def _cast(owner: nn.Module) -> set[torch.dtype]:
    plan_for("bf16-true").convert_module(nn.Sequential(owner))
    return {one.dtype for one in (*owner.parameters(), *owner.buffers()) if one.is_floating_point()}


F32, I32, I8, U8 = torch.float32, torch.int32, torch.int8, torch.uint8
W, SCALE, FREQS = ("frozen", F32), ("trained", F32), ("buffer", F32)
ORDINARY: dict[str, dict[str, tuple[str, torch.dtype]]] = {
    "a mask of bytes": {"scale": SCALE, "w": W, "mask": ("buffer", U8)},
    "positions": {"w": W, "scale": W, "position_ids": ("buffer", I32)},
    "a table's index": {"logit_scale": SCALE, "relative_position_index": ("buffer", I32), "coords": FREQS},
    "counts": {"weight": ("trained", F32), "scale": FREQS, "counts": ("buffer", I32)},
    "a frozen index": {"w": ("trained", F32), "index": ("frozen", torch.int64), "freqs": FREQS},
    "a frozen mask": {"w": W, "mask": ("frozen", torch.bool), "freqs": FREQS},
    "a class of parameters": {"w": ("marked", F32), "b": W, "freqs": FREQS},
    "a frozen parameter of an own class": {"w": ("frozen mark", F32), "b": W, "freqs": FREQS},
}
PACKED: dict[str, dict[str, tuple[str, torch.dtype]]] = {
    "GPTQ": {"qweight": ("buffer", I32), "qzeros": ("buffer", I32), "scales": FREQS},
    "BitNet": {"weight": ("buffer", U8), "weight_scale": FREQS},
    "MXFP4": {"proj_blocks": ("frozen", U8), "proj_scales": W},
    "codebooks": {"codes": ("frozen", I8), "codebooks": W, "scales": W},
    "HQQ": {"W_q": ("frozen", U8), "zero": W, "scale": W},
    "by hand": {"weight_int8": ("buffer", I8), "scale": FREQS},
    "to be quantized": {"weight": ("frozen Int8Params", F32), "SCB": FREQS},
    "float8": {"weight_scale_inv": SCALE, "weight": ("frozen", torch.float8_e5m2)},
}


@pytest.mark.parametrize("what", ORDINARY)
def test_integers_and_marks_that_quantize_nothing_leave_what_is_beside_them_ordinary(what: str) -> None:
    assert _cast(_owner(**ORDINARY[what])) == {torch.bfloat16}


@pytest.mark.parametrize("what", PACKED)
def test_what_belongs_to_packed_weights_stays(what: str) -> None:
    assert torch.bfloat16 not in _cast(_owner(**PACKED[what]))


@pytest.mark.parametrize(
    ("mode", "stored"), [("16-mixed", torch.float64), ("32-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_float64_is_stored_as_by_stock(mode: str, stored: torch.dtype) -> None:
    def double() -> Regression:
        model = Regression(lambda p: torch.optim.SGD(p, lr=1e-2))
        model.net[3].double()
        model.net.insert(3, Double() if stored == torch.float64 else nn.Identity())
        model.net[4].weight.data.mul_(1 + 1e-12)
        return model

    ours, theirs = double(), double()
    fit(ours, plugins=[plan_for(mode)])
    fit(theirs, **stock_for(mode))
    assert ours.net[4].weight.dtype == theirs.net[4].weight.dtype == stored
    assert torch.equal(ours.net[4].weight, theirs.net[4].weight)
    assert ours.losses == theirs.losses


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()
