"""Predicted memory is the allocator's, and a prediction leaves nothing behind."""

import os
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import Cell, Trained, measured, predicted
from lightning_mp import MixedPrecisionPlan, trainer_kwargs
from lightning_mp.comparison.compare import quiet
from lightning_mp.compat.lightning import Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import predict_memory
from lightning_mp.planner.memory import PARTS
from lightning_mp.planner.predict import ALONE
from support import hf
from support.models import Regression
from support.pipeline import Llama

#: of the allocator's peak; every cell but the convolutions in half precision is within 0.5 %
WITHIN = 0.05
FEW = (
    Cell("llama", "bf16-mixed", "none", "AdamW"),
    Cell("gpt2", "16-mixed", "full", "SGD"),
    Cell("llama", "bf16-true", "selective", "AdamW"),
    Cell("conv", "32-true", "none", "SGD"),
)


def _name(cell: Cell) -> str:
    return f"{cell.model} {cell.precision} {cell.checkpointing} {cell.optimizer}"


@pytest.mark.parametrize("cell", [FEW[0], *(pytest.param(cell, marks=pytest.mark.slow) for cell in FEW[1:])], ids=_name)
def test_the_peak_is_the_allocators(cell: Cell) -> None:
    found = predicted(cell)
    assert found.method == "traced"
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == found.peak_bytes
    assert found.peak_bytes == pytest.approx(measured(cell), rel=WITHIN)


BATCH = (torch.ones(8, 16), torch.ones(8, 1))


class _Reads(Regression):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self._what = what

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self._what(self.loss(batch[:2]), batch)


def _fails(loss: Tensor, batch: Any) -> Tensor:
    raise RuntimeError("of the user's own")


def _state(module: torch.nn.Module) -> list[Any]:
    tensors = [tensor.clone() for tensor in module.state_dict().values()]
    return [*tensors, torch.get_rng_state(), dict(os.environ), Path.cwd(), torch.nn.Module._apply]


@pytest.mark.parametrize("what", [lambda loss, _: loss, _fails], ids=["runs", "fails"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_everything_is_as_before(
    what: Any, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module, plan = _Reads(what), MixedPrecisionPlan("16-mixed")
    before, modules = _state(module), {name: type(inner) for name, inner in module.named_modules()}
    said = pytest.warns(UserWarning, match="of the user's own") if what is _fails else nullcontext()
    with said:
        found = predict_memory(module, BATCH, plan, strategy=strategy, devices=2)
    assert found.method == ("formula" if what is _fails else "traced")
    for one, other in zip(before, _state(module), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert {name: type(inner) for name, inner in module.named_modules()} == modules
    assert module._trainer is None
    assert plan.trainer is None
    assert not torch.distributed.is_initialized()
    assert not any(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


class _Optimized(Trained):
    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self._optimizer)([p for p in self.parameters() if p.ndim == 2])


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said where oneDNN's flags are set
def test_the_weights_that_are_kept_before_an_optimizers_first_step_are_counted() -> None:
    batch = torch.ones(8, 128), torch.zeros(8, dtype=torch.int64)

    def make() -> _Optimized:
        return _Optimized(torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3))), "Adafactor")

    given: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    found = predict_memory(make(), batch, MixedPrecisionPlan("32-true"), trainer_args=given)
    with quiet(), torch.backends.mkldnn.flags(enabled=False), PeakMemory() as peak:
        runner = Trainer(**trainer_kwargs(MixedPrecisionPlan("32-true"), devices=1, **given, **ALONE))
        runner.fit(make(), repeat(batch))
        del runner
    assert found.peak_bytes == pytest.approx(peak.bytes, rel=WITHIN)
    assert not found.notes


def test_what_cannot_be_traced_is_named() -> None:
    module = _Reads(lambda loss, _: loss * len(loss.new_ones(3).nonzero()))
    with pytest.warns(UserWarning, match=r"by a formula: .*aten.nonzero"):
        found = predict_memory(module, BATCH, MixedPrecisionPlan())
    assert found.method == "formula"
    assert "aten.nonzero" in found.notes[0]
    assert found.parts["parameters"] == 4 * sum(p.numel() for p in Regression().parameters())


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero3", "pipeline"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_under_zero_and_in_a_pipeline_the_formula_answers_and_its_parts_add_up(name: str, precision: str) -> None:
    module: Any = Trained(hf.llama(), "AdamW")
    batch: Any = torch.zeros(8, 6, dtype=torch.int64)
    if name == "pipeline":
        module, batch = Llama(), (torch.ones(8, 8), torch.ones(8, 1), batch)
    else:
        pytest.importorskip("deepspeed")
    devices = 4 if name == "pipeline" else 8
    found = predict_memory(module, batch, MixedPrecisionPlan(precision), strategy=name, devices=devices)
    assert found.method == "formula"
    assert ("pipeline" if name == "pipeline" else "DeepSpeed") in found.notes[0]
    assert tuple(found.parts) == PARTS
    assert min(found.parts.values()) >= 0
    assert sum(found.parts.values()) == found.peak_bytes
    if name == "pipeline":
        whole = 4 * sum(parameter.numel() for parameter in module.parameters())
        assert found.held["parameters"] == pytest.approx(whole / 4, abs=1)


def test_the_note_names_a_model_type_whose_activations_are_not_counted() -> None:
    pytest.importorskip("deepspeed")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=64)
    module = Trained(transformers.AutoModelForCausalLM.from_config(config), "AdamW")
    batch = torch.zeros(2, 6, dtype=torch.int64)
    found = predict_memory(module, batch, MixedPrecisionPlan("bf16-mixed"), strategy="deepspeed_zero2", devices=2)
    assert found.parts["activations"] == 0
    assert "model_type='mamba' is no dense decoder that is counted" in found.notes[-1]
    assert "activations are not counted" in found.notes[-1]
