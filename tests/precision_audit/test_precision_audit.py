"""PrecisionAudit: every fault it is for is found and named, it only reads, and it leaves nothing behind."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import PlanError
from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.compat.torch import cpu_has_lstm
from support import audit_faults as faults
from support.fp8 import RECIPES, plan, run
from support.fp8 import Language as Blocks
from support.language import Language, gpt2, llama, tokens
from support.models import Regression
from support.oracles import MODES, plan_for, stock_for
from support.running import fit

pytestmark = pytest.mark.usefixtures("own_folder")
NORM_PIN = {"*Norm": "fp32"}


def _bf16(**options: Any) -> dict[str, Any]:
    return {"plugins": [plan_for("bf16-mixed", **options)]}


def _audited(module: LightningModule, folder: Path, **arguments: Any) -> tuple[PrecisionAudit, list[str]]:
    callback = PrecisionAudit(run_dir=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        others = arguments.pop("callbacks", [])
        fit(module, callbacks=[*others, callback], max_steps=2, **arguments)
    return callback, [str(one.message) for one in caught if "PrecisionAudit" in str(one.message)]


TRUE, STOCK = {"plugins": [plan_for("bf16-true")]}, {"precision": "bf16-mixed"}
#: what is wrong, how it runs, the module and the column that differ, what is said of it
FAULTS: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], str, str, str]] = {
    "a module cast behind the plan": (faults.CastBehind, _bf16(), "net.3", "param", "cast by hand"),
    "a bf16 checkpoint under stock": (faults.HalfCheckpoint, STOCK, "net.0", "param", "no fp32 master weights"),
    "a pin lost by loading": (faults.LostPin, _bf16(pins=NORM_PIN), "net.1", "param", "after the pin"),
    "an op outside autocast": (faults.OutsideAutocast, _bf16(), "net.3", "compute", "autocast is off"),
    "autocast off inside a module": (faults.Inside, _bf16(), "net.2", "compute", "autocast is off"),
    "a product in the step itself": (faults.RootProduct, _bf16(), "", "compute", "autocast is off"),
    "a module that casts itself": (faults.Custom, _bf16(), "net.0", "compute", "casts its inputs"),
    "the same although pinned": (faults.Custom, _bf16(pins={"net.0": "fp32"}), "net.0", "compute", "not in force"),
    "a norm in half": (faults.NormInHalf, _bf16(), "net.1", "compute", "cast to half precision"),
    "a norm written out": (faults.OwnNormInHalf, _bf16(), "net.1", "compute", "cast to half precision"),
    "optimizer state in half": (faults.HalfState, _bf16(), "net.0", "optimizer_state", "optimizer keeps its state"),
    "optimizer state in fp32": (faults.FullState, TRUE, "net.0", "optimizer_state", "optimizer keeps its state"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_is_found_and_named_and_nothing_else(case: str, tmp_path: Path) -> None:
    make, how, module, column, reason = FAULTS[case]
    callback, told = _audited(make(), tmp_path, **how)
    row = next(row for row in callback.rows if row.module == module)
    assert [difference.what for difference in row.differences] == [column]
    assert reason in row.differences[0].reason
    (said,) = told
    assert (module or "(the root module)") in said
    assert reason in said
    everywhere = column == "optimizer_state" or make is faults.HalfCheckpoint
    wrong = {"net.0", "net.1", "net.3"} if everywhere else {module}
    assert {row.module for row in callback.rows if not row.ok} == wrong


def test_a_difference_can_stop_the_run(tmp_path: Path) -> None:
    module, said = faults.CastBehind(), "net.3 with parameters stored in bf16. Allowed: fp32, as MixedPrecisionPlan"
    with pytest.raises(PlanError, match=said):
        fit(module, callbacks=[PrecisionAudit(on_mismatch="raise", run_dir=tmp_path)], **_bf16())
    assert len(module.losses) == 1
    assert json.loads((tmp_path / "audit.json").read_text())["ok"] is False  # it was written all the same


def test_the_table_is_logged_written_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        callback, told = _audited(Regression(), tmp_path, **_bf16(pins={"net.3": "fp32"}, tf32="high"))
    assert told == []
    assert [(row.module, row.declared, row.compute, row.ok) for row in callback.rows] == [
        ("net.0", "bf16", "bf16", True),
        ("net.1", "bf16", "bf16, fp32", True),  # on the CPU autocast hands it the half input: weights stay fp32
        ("net.3", "fp32", "fp32", True),
    ]
    row = callback.rows[0]
    assert (row.param, row.input, row.output, row.grad, row.reduce) == ("fp32", "fp32", "bf16", "fp32", None)
    assert row.optimizer_state == "fp32"
    assert callback.report is not None
    assert json.loads((tmp_path / "audit.json").read_text()) == {"format_version": 1, **callback.report.to_dict()}
    assert (tmp_path / "audit.md").read_text() == callback.report.to_markdown()
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("PrecisionAudit")]
    assert len(logged) == 1
    assert "tf32='high' changes nothing on CPU" in logged[0]


class Hooked(Regression):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.hooked: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.hooked.append(bool(self.net[0]._forward_hooks or self.net[0]._forward_pre_hooks))
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        assert self.hooked[-1] == (mode is not None)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "accumulate", "steps"),
    [
        ({}, 1, [0]),
        ({"steps": 3}, 1, [0, 1, 2]),
        ({}, 4, [0, 1, 2, 3]),  # one optimizer step is four batches
        ({"steps": 100}, 1, list(range(8))),
    ],
)
def test_hooks_stand_in_its_steps_alone(
    options: dict[str, Any], accumulate: int, steps: list[int], tmp_path: Path
) -> None:
    module, callback = Hooked(), PrecisionAudit(run_dir=tmp_path, **options)
    fit(module, callbacks=[callback], accumulate_grad_batches=accumulate, **_bf16())
    assert [step for step, hooked in enumerate(module.hooked) if hooked] == steps
    assert callback.report is not None
    assert callback.rows[0].optimizer_state == "fp32"


CONVERTED = {f"blocks.{index}.{name}" for index in "01" for name in ("up", "down")}


class Planted(Blocks):
    def __init__(self) -> None:
        super().__init__()
        down = self.blocks[0].down
        down.register_forward_hook(lambda module, args, output: nn.functional.linear(args[0], module.weight))


def audited(module: Any, recipe: str, **fields: Any) -> Any:
    pytest.importorskip("torchao")
    watcher = PrecisionAudit()
    run(module, plan(recipe, **fields), callbacks=[watcher])
    return watcher


@pytest.mark.parametrize(
    ("recipe", "how"), [*((recipe, None) for recipe in RECIPES), ("rowwise", "full"), ("rowwise", "selective")]
)
def test_a_converted_layer_reads_fp8_and_the_others_bf16(recipe: str, how: Any) -> None:
    checkpointing = None if how is None else {"modules": "Block", "mode": how}
    watcher = audited(Blocks(), recipe, checkpointing=checkpointing)
    assert watcher.report.ok, watcher.report.to_markdown()
    rows = {row.module: row for row in watcher.rows}
    assert {rows[name].compute for name in CONVERTED} == {"fp8"}
    assert {rows[name].declared for name in CONVERTED} == {"fp8"}
    assert (rows["lm_head"].declared, rows["lm_head"].compute) == ("bf16", "bf16")
    assert {rows[name].param for name in CONVERTED} == {rows[name].grad for name in CONVERTED} == {"fp32"}


def test_a_product_in_bf16_where_fp8_is_declared_is_a_deviation() -> None:
    with pytest.warns(UserWarning, match="PrecisionAudit"):
        watcher = audited(Planted(), "rowwise")
    wrong = [row.module for row in watcher.rows if not row.ok]
    assert wrong == ["blocks.0.down"]
    assert "did not run in FP8" in watcher.report.explanation()


#: model, norms to pin, blocks to recompute
LANGUAGE: dict[str, tuple[Callable[..., Any], dict[str, str], str]] = {
    "llama": (llama, {"*norm*": "fp32", "lm_head": "fp32"}, "LlamaDecoderLayer"),
    "gpt2, tied": (gpt2, {"LayerNorm": "fp32", "lm_head": "fp32"}, "GPT2Block"),
}


def _own_parameters(module: LightningModule) -> set[str]:
    return {name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None}


def _as_declared(module: LightningModule, folder: Path, data: Any = None, **precision: Any) -> PrecisionAudit:
    callback = PrecisionAudit(2, "raise", folder)
    fit(module, data=data, callbacks=[callback], max_steps=2, **precision)
    assert {row.module for row in callback.rows} == _own_parameters(module)
    return callback


@pytest.mark.parametrize(
    ("name", "recomputed", "pinned", "mode"),
    [
        *(("llama", "full", True, mode) for mode in MODES),
        ("llama", "", False, "bf16-mixed"),
        ("llama", "selective", True, "16-mixed"),
        ("gpt2, tied", "full", True, "bf16-true"),
        ("gpt2, tied", "", False, "16-mixed"),
    ],
)
def test_language_models(name: str, recomputed: str, pinned: bool, mode: str, tmp_path: Path) -> None:
    make, pins, blocks = LANGUAGE[name]
    checkpointing = {"modules": blocks, "mode": recomputed} if recomputed else None
    plan = plan_for(mode, pins=pins if pinned else None, checkpointing=checkpointing)
    callback = _as_declared(Language(make()), tmp_path, tokens(), plugins=[plan])
    linear = next(row for row in callback.rows if row.module.endswith(("q_proj", "c_attn")))
    assert linear.compute == linear.declared == plan.policy.compute_dtype
    head = callback.rows[-1]
    assert (head.module, head.compute) == ("model.lm_head", "fp32" if pinned else plan.policy.compute_dtype)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(10, 8), kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.idle, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(x) * self.scale)


def _convolutions() -> nn.Module:
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4))
    return nn.Sequential(one, nn.InstanceNorm2d(4, affine=True), nn.ConvTranspose2d(4, 2, 2))


def _parametrized() -> nn.Module:
    weight, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(weight(nn.Linear(8, 8)), nn.RMSNorm(8), spectral(nn.Linear(8, 2)))


HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
#: model, one row of its data; whole numbers below 10 where it is one of tokens
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "convolutions": (_convolutions, (3, 8, 8), False),
    "lstm": (lambda: Recurrent(nn.LSTM), (5,), True),
    "gru": (lambda: Recurrent(nn.GRU), (5,), True),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 2)), (5,), True),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (5, 8), False),
    "parametrized": (_parametrized, (8,), False),
    "partly used": (PartlyUsed, (8,), False),
    "bare norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)), (8,), False),
}


class Vanishing(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's, of its RMSNorm
@pytest.mark.parametrize(("how", "mode"), [("plan", "bf16-mixed"), ("plan", "16-true"), ("stock", "16-mixed")])
@pytest.mark.parametrize("name", NETS)
def test_nets_of_every_kind(name: str, how: str, mode: str, tmp_path: Path) -> None:
    if name == "lstm" and mode.endswith("mixed") and not cpu_has_lstm(HALVES[mode]):
        pytest.skip(f"oneDNN has no LSTM under autocast on this CPU for {mode}")
    make, shape, whole = NETS[name]
    rows = torch.randint(0, 10, (4, *shape)) if whole else torch.randn(4, *shape)
    stock = {"precision": "16-true"} if mode == "16-true" else stock_for(mode)
    precision = {"plugins": [plan_for(mode)]} if how == "plan" else stock
    callback = _as_declared(Vanishing(make()), tmp_path, DataLoader(TensorDataset(rows), batch_size=2), **precision)
    idle = [row for row in callback.rows if row.module.endswith("idle")]
    assert all((row.input, row.compute, row.ok) == (None, None, True) for row in idle)
