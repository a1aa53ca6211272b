"""A checkpoint of stages is the one that a single process writes, and is loaded in any number of stages."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_mp import consolidate
from support.comparing import furthest, same
from support.pipeline import Fit, OnMeta, Staged, Under
from support.ranks import Ranks

pytestmark = pytest.mark.gloo
FIRST = Fit("16-mixed", scale=64.0, steps=2)
TWO_EPOCHS = (("max_epochs", 2),)


def _saved(folder: Path) -> Fit:
    return replace(FIRST, save=str(folder / "two.ckpt"))


def test_it_is_the_file_of_one_process_and_resumes_as_it_does(folder: Path, ranks: Ranks) -> None:
    saved = _saved(folder)
    ranks.run(saved)
    saved.alone()
    staged, alone = (torch.load(folder / name, weights_only=False) for name in ("two.ckpt", "two.ckpt.alone"))
    for key in ("state_dict", "optimizer_states", "MixedPrecisionPlan"):
        assert same(staged[key], alone[key]), key
    Staged().load_state_dict(staged["state_dict"])
    consolidate(folder / "two.ckpt", folder / "plain.pt")
    assert furthest(torch.load(folder / "plain.pt"), alone["state_dict"]) == 0.0
    more = replace(FIRST, arguments=TWO_EPOCHS, load=str(folder / "two.ckpt"))
    expected = more.alone()
    for results in (ranks.run(more), ranks.run(replace(more, module=OnMeta))):
        for key in ("counts", "scale", "steps", "rates"):
            assert results[0][key] == expected[key], key
        assert same(results[0]["weights"], expected["weights"])
        assert same(results[0]["optimizer"], expected["optimizer"])


def test_another_strategy_resumes_it(folder: Path, ranks: Ranks) -> None:
    ranks.run(_saved(folder))
    _saved(folder).alone()
    more = Under(**{**vars(FIRST), "arguments": TWO_EPOCHS, "load": str(folder / "two.ckpt")})
    results, expected = ranks.run(more), replace(FIRST, arguments=TWO_EPOCHS, load=more.load).alone()
    for key in ("counts", "scale", "steps", "rates"):
        assert results[0][key] == expected[key], key
    assert same(results[0]["weights"], expected["weights"], 1e-6)


@pytest.mark.slow
def test_replicas_may_be_added(folder: Path, ranks: Ranks, four: Ranks) -> None:
    ranks.run(_saved(folder))
    _saved(folder).alone()
    more = {"replicas": 2, "options": (("shard", True),)}
    fit = replace(FIRST, arguments=TWO_EPOCHS, load=str(folder / "two.ckpt"), **more)
    results, expected = four.run(fit), fit.alone()
    assert results[0]["steps"] == expected["steps"] == 4
    assert same(results[0]["weights"], expected["weights"], 1e-6)
