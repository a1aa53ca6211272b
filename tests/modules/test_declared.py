"""What a model itself keeps in fp32 stays fp32 under the true modes, as transformers' ``from_pretrained`` keeps it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightning_mp import LossScaling, MixedPrecisionPlan, doctor
from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.checkpoints import consolidate
from lightning_mp.numerics.dtypes import default_dtype
from support import hf
from support.hf import MODELS, loss_of, token_batches
from support.running import fit
from support.saving import SaveAt

pytestmark = pytest.mark.usefixtures("own_folder")
FP32, RATE = torch.float32, 0.1
HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
#: what a part of the names of the fp32 parameters is, by model and mode
DECLARED = {
    ("t5", "16-true"): ".wo.",
    ("t5", "bf16-true"): None,  # transformers' list that is not strict is for fp16 alone
    ("ernie", "16-true"): ".mlp.gate.",
    ("ernie", "bf16-true"): ".mlp.gate.",
    ("llama", "bf16-true"): None,
}
#: a scale of 1 leaves the gradients as those of the plain loop
OPTIONS: dict[str, Any] = {"bf16-true": {}, "16-true": {"loss_scaling": LossScaling.static(1.0)}}


class Language(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = MODELS[kind]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=RATE)


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "mode"), DECLARED)
def test_a_run_is_that_of_a_plain_loop_on_the_model_as_transformers_loads_it(
    kind: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, part = Language(kind), DECLARED[kind, mode]
    module.model.save_pretrained(tmp_path)
    plain = type(module.model).from_pretrained(tmp_path, dtype=HALF[mode]).train()
    plain.load_state_dict(module.model.state_dict())
    audit = PrecisionAudit()
    with caplog.at_level(logging.INFO):
        plan = MixedPrecisionPlan(mode, **OPTIONS[mode])
        fit(module, data=token_batches(), plugins=[plan], callbacks=[audit])

    optimizer = SGD(plain.parameters(), lr=RATE)
    for ids in token_batches():
        with default_dtype(HALF[mode]):
            loss_of(plain, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    fp32 = {name for name, dtype in _dtypes(module.model).items() if dtype == FP32}
    assert fp32 == {name for name in _dtypes(plain) if part and part in name}
    assert _dtypes(module.model) == _dtypes(plain)
    assert plan.applied_steps == 8
    for name, parameter in plain.named_parameters():
        assert torch.equal(module.model.get_parameter(name), parameter), name
    assert audit.report is not None
    assert audit.report.ok, audit.report.to_text()
    said = f" fp32, as {type(plain).__name__} declares: "
    assert (said in caplog.text) == (said in plan.describe(module)) == (part is not None)
    rotary = "'rotary frequencies' fp32, as "
    assert (rotary in plan.describe(module)) == (kind != "t5")
    buffers = {name: buffer.dtype for name, buffer in module.model.named_buffers()}
    assert buffers == {name: buffer.dtype for name, buffer in plain.named_buffers()}


LONG = 4096


@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_a_llama_reads_long_texts_at_the_positions_that_transformers_gives_it(mode: str, tmp_path: Path) -> None:
    model, ids = hf.llama(max_position_embeddings=LONG), torch.arange(LONG)[None] % hf.VOCABULARY
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=HALF[mode]).eval()
    MixedPrecisionPlan(mode).apply(model.eval())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, FP32),
        ({"buffer_dtype": "bf16"}, torch.bfloat16),
        ({"pins": {"LlamaRotaryEmbedding": "bf16"}}, torch.bfloat16),
        ({"pins": {"*rotary*": "fp32"}}, FP32),
    ],
)
def test_a_word_of_the_users_decides_over_what_a_rotary_embedding_declares(
    options: dict[str, Any], stored: torch.dtype
) -> None:
    model = hf.llama()
    MixedPrecisionPlan("bf16-true", **options).apply(model)
    assert model.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.original_inv_freq.dtype == stored


class Embedding(nn.Module):
    """A rotary embedding of nobody's library: it is cast, as by stock."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10_000 ** (torch.arange(8) / 8), persistent=persistent)


class OfOnesOwn(LlamaRotaryEmbedding):
    """Scaled by a user, and transformers' all the same."""


def test_what_is_no_rotary_embedding_of_transformers_is_cast_and_named_by_the_doctor() -> None:
    model = nn.ModuleDict({"own": Embedding(), "saved": Embedding(True), "scaled": OfOnesOwn(hf.llama().config)})
    (finding,) = [each for each in doctor(model, MixedPrecisionPlan("bf16-true")) if each.code == "LMP024"]
    assert "2 buffers of positions rounded to bf16: own.inv_freq, saved.inv_freq" in finding.what
    assert "pins={'Embedding': 'fp32'}" in finding.fix
    pinned = MixedPrecisionPlan("bf16-true", pins={"Embedding": "fp32"})
    for plan in (pinned, MixedPrecisionPlan("bf16-true", buffer_dtype="fp32"), MixedPrecisionPlan("bf16-mixed")):
        assert "LMP024" not in {each.code for each in doctor(model, plan)}
    stock = {each.code: each for each in doctor(model, "bf16-true")}["LMP024"]
    assert "DtypePinning({'Embedding': 'fp32', 'OfOnesOwn': 'fp32'})" in stock.fix
    MixedPrecisionPlan("bf16-true").apply(model)
    assert [each.inv_freq.dtype for each in model.values()] == [torch.bfloat16, torch.bfloat16, FP32]


def test_what_is_saved_of_a_plan_names_no_buffer_that_is_not_saved() -> None:
    module = Language("llama")
    plan = MixedPrecisionPlan("bf16-true")
    plan.apply(module)
    assert "fp32" not in plan.state_dict()


def test_a_pin_of_the_users_overrides_the_models_own() -> None:
    model = MODELS["t5"]()
    plan = MixedPrecisionPlan("16-true", pins={"decoder.*.wo": "fp16"})
    plan.apply(model)
    assert {name for name, dtype in _dtypes(model).items() if dtype == FP32} == {
        f"encoder.block.{index}.layer.1.DenseReluDense.wo.weight" for index in (0, 1)
    }
    assert "'wo' fp32, as T5ForConditionalGeneration declares: 2 modules" in plan.describe(model)


@pytest.mark.parametrize(("kind", "dtype", "part"), [("t5", "fp16", ".wo."), ("ernie", "bf16", ".mlp.gate.")])
def test_a_half_file_keeps_it_in_fp32_and_transformers_loads_it(
    kind: str, dtype: str, part: str, tmp_path: Path
) -> None:
    module, folder = Language(kind), tmp_path / "model"
    norms = {"t5": "final_layer_norm", "ernie": "model.norm"}[kind]
    plan = MixedPrecisionPlan("bf16-mixed", pins={norms: "fp32"})
    fit(module, data=token_batches(), plugins=[plan], callbacks=[SaveAt(tmp_path, 8)])
    module.model.config.save_pretrained(folder)
    path = consolidate(tmp_path / "8.ckpt", folder / "model.safetensors", dtype, prefix="model")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    written = load_file(path)
    kept = {name for name, tensor in written.items() if tensor.dtype == FP32}
    assert kept == {name for name in written if part in name or norms in name}
    assert {tensor.dtype for name, tensor in written.items() if name not in kept} == {half}

    loaded = type(module.model).from_pretrained(folder, dtype=half)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, module.model.get_parameter(name).to(parameter.dtype)), name
    everything = load_file(consolidate(tmp_path / "8.ckpt", tmp_path / "all.safetensors", dtype, cast_all=True))
    assert {tensor.dtype for tensor in everything.values() if tensor.is_floating_point()} == {half}
