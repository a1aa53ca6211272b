"""Example 06 fine-tunes a real model: retrieval improves, only LoRA is trained, and every dtype is as declared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp import doctor
from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.monitor.audit import AuditRow
from support.examples import handed_to_fit, load, path_of, run, warned
from support.running import trainer

#: few, so that this takes seconds; the whole of it is run by the slow test
STEPS, ASKED = 5, 120


@dataclass(frozen=True, slots=True)
class FineTuned:
    """The example's model after a few steps of the example's plan, and what it was before."""

    model: Any
    weights: dict[str, Tensor]
    found: tuple[float, float]
    rows: dict[str, AuditRow]


def mean_reciprocal_rank(scores: Tensor) -> float:
    """Of the entry on the diagonal, in its row, 1 being the highest."""
    above = (scores > scores.diagonal().unsqueeze(1)).sum(dim=1)
    return (1 / (1 + above)).mean().item()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        handed, model, _ = handed_to_fit(path_of("06"), (), patch)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example, audit = load("06"), PrecisionAudit(run_dir=folder / "audit")
    runner = trainer(plugins=[handed.precision_plugin], callbacks=[audit], max_epochs=-1, max_steps=STEPS)
    asked = DataLoader(example.pairs(held_out=True)[:ASKED], batch_size=ASKED)
    (before,) = runner.predict(model, asked)
    runner.fit(model, DataLoader(example.pairs(held_out=False), batch_size=32, shuffle=True))
    (after,) = runner.predict(model, asked)
    found = mean_reciprocal_rank(before), mean_reciprocal_rank(after)
    return FineTuned(model, weights, found, {row.module: row for row in audit.rows})


def test_docstrings_of_modules_it_never_saw_are_found_better_after_a_few_steps(tuned: FineTuned) -> None:
    before, after = tuned.found
    assert after > before + 0.05


def test_only_lora_is_trained_and_the_pretrained_weights_keep_every_bit(tuned: FineTuned) -> None:
    now = tuned.model.state_dict()
    assert now.keys() == tuned.weights.keys()
    changed = {name for name, before in tuned.weights.items() if not torch.equal(now[name], before)}
    assert changed == {name for name in now if ".lora_" in name}
    trained = {name for name, parameter in tuned.model.named_parameters() if parameter.requires_grad}
    assert changed == trained


def test_products_run_in_bf16_norms_in_fp32_and_every_weight_is_stored_in_fp32(tuned: FineTuned) -> None:
    assert all(row.ok and row.param == "fp32" for row in tuned.rows.values())
    norms = {name: row.compute for name, row in tuned.rows.items() if name.endswith("LayerNorm")}
    lora = {name: row for name, row in tuned.rows.items() if ".lora_" in name}
    products = {name: row.compute for name, row in tuned.rows.items() if name.endswith("base_layer")}
    assert (len(norms), set(norms.values())) == (1 + 2 * 6, {"fp32"})
    assert (len(lora), {row.compute for row in lora.values()}) == (2 * len(products), {"bf16"})
    assert {(row.grad, row.optimizer_state) for row in lora.values()} == {("fp32", "fp32")}
    assert set(products.values()) == {"bf16"}


def test_what_is_asked_about_is_not_trained_on() -> None:
    train, held_out = (load("06").pairs(held_out=part) for part in (False, True))
    assert min(len(train), len(held_out)) > 400
    for index, what in enumerate(("signature", "docstring")):
        shared = {pair[index] for pair in train} & {pair[index] for pair in held_out}
        assert shared == set(), what
    assert {signature[0] for signature, _ in held_out} == set("abc")
    assert {signature[0] for signature, _ in train}.isdisjoint("abc")


def test_the_doctor_has_nothing_to_say_but_for_the_eval_mode_that_the_example_leaves(tuned: FineTuned) -> None:
    model = tuned.model.train()
    assert [finding for finding in doctor(model, "bf16-mixed") if finding.severity != "info"] == []
    assert ("LMP003", "eval_mode") in {(finding.code, finding.name) for finding in doctor(model.eval(), "bf16-mixed")}


@pytest.mark.slow
def test_it_runs_as_it_is_and_finds_far_more_afterwards(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "here").mkdir()
    ran = run("06", tmp_path / "here", timeout=280)
    assert warned(ran, pytestconfig.getini("filterwarnings")) == []
    before, after = (
        tuple(map(float, ran.find(rf" {steps} steps: recall@1 ([\d.]+), MRR@10 ([\d.]+)"))) for steps in (0, 20)
    )
    assert 0.1 < before[0] < before[1]
    assert after[0] > before[0] + 0.1
    assert after[1] > before[1] + 0.1
    assert list((tmp_path / "here").iterdir()) == []
