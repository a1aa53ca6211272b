"""The scales of FP8 layers: read on the device, the same as by hand, and a jump names the layer and what was scaled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.health.fp8_scales import READINGS_BETWEEN
from lightning_mp.record import metric_names
from support import fp8
from support.models import Regression
from support.running import fit

pytest.importorskip("torchao")
E4M3, E5M2 = 448.0, 57344.0
#: the layers of ``fp8.Language`` that are converted
LAYERS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
#: magnitudes are those of bf16 numbers
ROUNDING = 2.0**-8


class Measured(fp8.Language):
    """Keeps the largest magnitudes of what each converted layer multiplies in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[tuple[str, str], float] = {}
        for name in LAYERS:
            self.get_submodule(name).register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def kept(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            if (name, "weight") in self.largest:
                return
            self.largest[name, "input"] = inputs[0].detach().abs().max().item()
            self.largest[name, "weight"] = layer.weight.detach().abs().max().item()
            output.register_hook(lambda gradient: self._keep_gradient(name, gradient))

        return kept

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        self.largest[name, "gradient"] = gradient.detach().abs().max().item()


@pytest.mark.parametrize(("recipe", "of_gradients"), [("rowwise", E4M3), ("tensorwise", E5M2), ("mxfp8", E4M3)])
def test_the_smallest_and_the_largest_scale_are_logged(recipe: str, of_gradients: float, tmp_path: Path) -> None:
    module, health = Measured(), TrainingHealth(tmp_path, report=False)
    fp8.run(module, fp8.plan(recipe), callbacks=[health], max_steps=1)
    assert len(module.largest) == 3 * len(LAYERS)
    scales = [(of_gradients if role == "gradient" else E4M3) / largest for (_, role), largest in module.largest.items()]
    (row,) = health.rows
    assert row[metric_names.FP8_SCALE_MIN] == pytest.approx(min(scales), rel=ROUNDING)
    assert row[metric_names.FP8_SCALE_MAX] == pytest.approx(max(scales), rel=ROUNDING)


@pytest.mark.parametrize("checkpointing", [None, "*"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_reading_scales_changes_no_bit(recipe: str, checkpointing: str | None, tmp_path: Path) -> None:
    alone, watched = fp8.Language(), fp8.Language()
    health = TrainingHealth(tmp_path, report=False)
    fp8.run(alone, fp8.plan(recipe, checkpointing=checkpointing))
    fp8.run(watched, fp8.plan(recipe, checkpointing=checkpointing), callbacks=[health])
    assert fp8.same(alone, watched)
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, watched.get_parameter(name)), name
    read = [row[metric_names.FP8_SCALE_MIN] is not None for row in health.rows]
    assert read == [step % READINGS_BETWEEN == 0 for step in range(8)]


def test_without_fp8_there_are_no_scales(tmp_path: Path) -> None:
    health = TrainingHealth(tmp_path, report=False)
    fit(Regression(), plugins=[MixedPrecisionPlan("bf16-mixed")], callbacks=[health])
    assert health.rows
    assert {row[metric_names.FP8_SCALE_MIN] for row in health.rows} == {None}


class Jumps(fp8.Language):
    """From step ``at`` on, what goes into one layer is ``times`` as large; the layer undoes it."""

    def __init__(self, at: int, times: float) -> None:
        super().__init__()
        self.at, self.times = at, times
        self.get_submodule("blocks.1.up").register_forward_pre_hook(self._multiply)

    def _multiply(self, layer: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] * (self.times if self.global_step >= self.at else 1.0),)


@pytest.mark.parametrize(("times", "change"), [(32.0, "drop"), (1 / 32, "rise")])
def test_a_jump_names_layer_role_and_factor(times: float, change: str, tmp_path: Path) -> None:
    module, health = Jumps(34, times), TrainingHealth(tmp_path, report=False)
    fp8.run(module, fp8.plan(), callbacks=[health], max_steps=36, max_epochs=-1)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["kind"] == "scale_jump")
    assert (event["step"], event["severity"], event["module"]) == (34, "warning", "blocks.1.up")
    assert (event["evidence"]["role"], event["evidence"]["change"]) == ("input", change)
    assert event["evidence"]["factor"] == pytest.approx(32, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_200_healthy_steps_are_silent(recipe: str, tmp_path: Path) -> None:
    module, health = fp8.Language(), TrainingHealth(tmp_path, report=False)
    fp8.run(module, fp8.plan(recipe), callbacks=[health], max_steps=200, max_epochs=-1)
    assert module.losses[-1] < 0.5 * module.losses[0], "it learns"
    assert [event for event in health.events if event.kind == "scale_jump"] == []
    assert sum(row[metric_names.FP8_SCALE_MIN] is not None for row in health.rows) == 100
