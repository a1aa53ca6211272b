"""The public names, their signatures and the commands' options change on purpose, with a line in the changelog."""

import difflib

from support.public_api import SNAPSHOT, render


def test_the_public_names_are_those_of_the_snapshot() -> None:
    stored, current = SNAPSHOT.read_text(encoding="utf-8"), render()
    changes = "\n".join(difflib.unified_diff(stored.splitlines(), current.splitlines(), "stored", "current", n=0))
    todo = "Write a line in CHANGELOG.md under Unreleased, then run PYTHONPATH=tests python -m support.public_api"
    assert current == stored, f"the public names have changed:\n{changes}\n{todo}"


def test_the_snapshot_has_names_signatures_and_options() -> None:
    text = SNAPSHOT.read_text(encoding="utf-8")
    for line in ("lightning_mp.make_strategy(name, plan", "lightning_mp.callbacks.TrainingHealth(", "train --show"):
        assert line in text
