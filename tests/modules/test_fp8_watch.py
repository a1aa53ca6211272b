"""What is seen of FP8's operands: the numbers, the alerts with layer and role, and the way back to bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp import NonFiniteError
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.health import throughput
from lightning_mp.modules.fp8_watch import Watch
from lightning_mp.policy import hardware
from lightning_mp.record import metric_names
from support import fp8
from support.fp8_faults import AT, FAULTS, LAYER, Across, Changed, watched
from support.ranks import Ranks

pytest.importorskip("torchao")
CPU = torch.device("cpu")
ROLES = ("input", "weight", "gradient")


# ------------------------------------------------------------------ the numbers


def wide(*shape: int) -> Tensor:
    """Lognormal with a standard deviation of 5: what one scale a tensor cannot hold."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(5).exp()


def cast_by_torchao(values: Tensor, recipe: str, role: str) -> Any:
    """A tensor that holds FP8, as the recipe's own configuration makes it of an operand (rows, …)."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    config = Float8LinearConfig.from_recipe_name({"rowwise_gw_hp": "rowwise_with_gw_hp"}.get(recipe, recipe))
    how = getattr(config, {"gradient": "cast_config_grad_output"}.get(role, f"cast_config_{role}"))
    by_row = "AXISWISE" in str(how.scaling_granularity)
    return hp_tensor_to_float8_dynamic(
        values,
        how.target_dtype,
        LinearMMConfig(),
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=-1 if by_row else None,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def test_under_mxfp8_a_block_of_small_numbers_is_flushed_by_a_large_one_in_it_alone() -> None:
    watch, layer = Watch("mxfp8"), nn.Linear(64, 32, bias=False)
    rows = torch.full((4, 64), 1e-6)
    rows[:, 0] = 448.0
    watch.begin({"it": layer}, CPU)
    watch.note(layer(rows), rows, layer.weight, layer.__dict__["_lmp_fp8_seen"]).sum().backward()
    flushed, largest, scale = watch.operands(watch.end().tolist())["it", "input"]
    assert (flushed, largest, scale) == (pytest.approx(31 / 64), 448.0, 1.0)


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_it_is_what_torchao_makes_of_the_operands(recipe: str) -> None:
    watch, layer = Watch(recipe), nn.Linear(64, 32, bias=False)
    rows, gradient = wide(48, 64), torch.zeros(48, 32).index_fill(1, torch.tensor([0]), 1.0) + wide(48, 32)
    layer.weight.data = wide(32, 64)
    watch.begin({"it": layer}, CPU)
    seen = layer.__dict__["_lmp_fp8_seen"]
    watch.note(layer(rows), rows, layer.weight, seen).backward(gradient)
    found = watch.operands(watch.end().tolist())
    for role, values in zip(ROLES, (rows, layer.weight.detach(), gradient), strict=True):
        held = cast_by_torchao(values, recipe, role)
        flushed = ((held._data.float() == 0) & (values != 0)).sum() / (values != 0).sum()
        assert found["it", role] == pytest.approx((float(flushed), float(values.abs().max()), float(held._scale.min())))
    assert found["it", "input"][0] > 0.1


def test_mfu_counts_fp8_products_at_fp8s_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were an H100: the time that each kind of product takes at its own peak, over the time it took."""
    h100 = hardware.Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    monkeypatch.setattr(throughput, "describe", lambda _: h100)
    health, _, _ = watched(tmp_path, steps=2, rule={"emulate": False}, data=fp8.texts(rows=8, length=8))
    in_fp8, rest = 4 * 6 * fp8.WIDTH * 2 * fp8.WIDTH, 6 * fp8.WIDTH * fp8.VOCABULARY  # a token, forward and backward
    bf16, faster = (hardware.peak(h100, dtype) for dtype in ("bf16", "fp8"))
    assert bf16 is not None
    assert faster is not None
    assert faster.flops_per_s > bf16.flops_per_s
    ideal = in_fp8 / faster.flops_per_s + rest / bf16.flops_per_s
    for row in health.rows:
        assert row[metric_names.MFU] == pytest.approx(ideal * row[metric_names.TOKENS_PER_S])


@pytest.mark.parametrize("recipe", [*fp8.RECIPES, "mxfp8"])
def test_watching_changes_no_bit_and_sees_every_layer_and_role(recipe: str, tmp_path: Path) -> None:
    health, module, plugin = watched(tmp_path, recipe, steps=4)
    unwatched = fp8.run(fp8.Language(), fp8.plan(recipe, emulate=True), data=fp8.texts(rows=16))
    assert fp8.same(module, unwatched)
    converted = [layer.name for layer in plugin.fp8_layers if layer.converted]
    for row in health.fp8_rows:
        assert {name: list(roles) for name, roles in row["layers"].items()} == {name: list(ROLES) for name in converted}
    lost = [
        max(one["flushed"] for roles in row["layers"].values() for one in roles.values()) for row in health.fp8_rows
    ]
    assert [row[metric_names.FP8_FLUSHED] for row in health.rows] == lost
    written = [json.loads(line) for line in (tmp_path / "run" / "fp8.jsonl").read_text().splitlines()]
    assert written == health.fp8_rows


CHECKPOINTING = {"full": "Block", "selective": {"modules": "Block", "mode": "selective"}}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own tracing asks
@pytest.mark.parametrize(
    ("checkpointing", "compiled"), [*((how, None) for how in CHECKPOINTING), (None, "eager"), ("full", "aot_eager")]
)
def test_checkpointing_and_compile_see_the_same(
    checkpointing: str | None, compiled: str | None, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    plain, module, _ = watched(tmp_path / "plain", steps=3)
    rule = {"checkpointing": CHECKPOINTING.get(checkpointing or "")}
    other, same, _ = watched(tmp_path / "other", steps=3, compiled=compiled, rule=rule)
    assert other.fp8_rows == plain.fp8_rows
    assert fp8.same(same, module)


class Asked(TorchFunctionMode):
    """Counts how often a number is asked of a tensor: what waits for a GPU."""

    names = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


class Counts(Callback):
    """How often a tensor's value was asked for in each batch; it comes last, and so watches the others."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.asked = Asked()
        self.asked.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.asked.__exit__(None, None, None)
        self.counts.append(self.asked.count)


def test_between_readings_nothing_is_read(tmp_path: Path) -> None:
    asked = []
    for every in (1, 4):
        counts = Counts()
        watched(tmp_path / str(every), steps=8, monitor={"every_n_steps": every}, callbacks=[counts])
        asked.append(counts.counts)
    watched_steps, seldom = asked
    assert len(set(watched_steps[1:])) == 1
    assert [count for step, count in enumerate(seldom) if step % 4] == [watched_steps[1]] * 6


# ------------------------------------------------------------------ alerts


@pytest.mark.parametrize(("kind", "role"), FAULTS)
def test_a_planted_fault_is_found_with_layer_and_role(kind: str, role: str, tmp_path: Path) -> None:
    health, _, _ = watched(tmp_path, steps=AT + 2, plant=FAULTS[kind, role])
    event = next(event for event in health.events if event.kind == kind)
    assert (event.module, event.evidence["role"], event.action) == (LAYER, role, "log")
    assert event.cause
    assert f"skip=('lm_head', '{LAYER}'))" in event.advice
    assert event.step == (AT if kind == "scale_jump" else 9)
    assert [other.module for other in health.events if other.kind == "fp8_underflow"] in ([], [LAYER])


# ------------------------------------------------------------------ more than one process


BLOCK = {"wrap": "Block"}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "options", "rule"),
    [
        ("ddp", {}, {}),
        ("fsdp2", BLOCK, {"all_gather": True}),
        pytest.param("deepspeed_zero2", {}, {}, marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp2", "zero2"],
)
def test_two_processes_see_the_same(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, strategy: str, options: dict[str, Any], rule: dict[str, Any]
) -> None:
    first, second = ranks.run(Across(strategy, tmp_path_factory.mktemp(strategy), options, rule))
    assert {**first, "losses": 0} == {**second, "losses": 0}
    assert first["events"][0]["step"] == AT
    assert first["events"][0]["module"] == LAYER
    assert first["losses"] == ranks.run(Across("ddp", tmp_path_factory.mktemp("whole")))[0]["losses"]


# ------------------------------------------------------------------ non-finite steps


def _inf(values: Tensor) -> Tensor:
    return values * torch.inf


@pytest.mark.parametrize("role", ROLES)
def test_a_bad_step_names_layer_and_operand(role: str, tmp_path: Path) -> None:
    def plant(module: Any) -> None:
        layer = module.get_submodule(LAYER)
        if role == "weight":
            layer.weight.data[3, 3] = torch.nan
        elif role == "input":
            layer.register_forward_pre_hook(lambda _, a: (_inf(a[0]),))
        else:
            layer.register_forward_hook(lambda _, a, output: Changed.apply(output, _inf))

    events: list[Any] = []

    class Keeps(Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            events.extend(next(one for one in trainer.callbacks if isinstance(one, TrainingHealth)).events)

    with pytest.raises(NonFiniteError, match="applied 0 of its 2"):
        watched(tmp_path, steps=2, plant=plant, callbacks=[Keeps()])
    event = events[0]
    assert event.kind.startswith("nonfinite")
    assert (event.module, event.evidence["role"]) == (LAYER, role)
