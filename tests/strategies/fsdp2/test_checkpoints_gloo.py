"""FSDP2 goes on from its own checkpoints: by as many processes, by fewer and by more, from shards and from one file."""

from __future__ import annotations

from typing import Any

import pytest

from support import fsdp2
from support.comparing import of_ranks, same
from support.fsdp2_saving import AT
from support.gloo import run_ranks
from support.models import same_weights

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

#: optimizers whose groups are in another order than the model's parameters, that keep no state, and usual ones
OPTIMIZERS = ("fused", "groups", "sgd", "momentum")
FORMS = ("shards", "file")
HOSTS = {"shards": ("fsdp2",), "file": ("fsdp2", "ddp")}
CASES = [(optimizer, form, host) for optimizer in OPTIMIZERS for form in FORMS for host in HOSTS[form]]
SAVE, RESUME = "fsdp2_saving:save", "fsdp2_saving:resume"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """One process saves; two save, and go on from that and from their own; one goes on from theirs."""
    folder = tmp_path_factory.mktemp("fsdp2")

    def resumed(optimizer: str, form: str, host: str) -> tuple[str, str, tuple[Any, ...]]:
        return f"{optimizer} {form} {host}", RESUME, (str(folder / f"{optimizer} {form}"), host, optimizer)

    one = [(f"save {o}", SAVE, (str(folder / f"{o} one"), "fsdp2", o, False)) for o in OPTIMIZERS]

    def saved(optimizer: str, form: str) -> tuple[str, str, tuple[Any, ...]]:
        place = str(folder / f"{optimizer} {form}")
        return f"save {optimizer} {form}", SAVE, (place, "fsdp2", optimizer, form == "file")

    two = [
        *(saved(optimizer, form) for optimizer in OPTIMIZERS for form in FORMS),
        *(resumed(*case) for case in CASES),
        *((f"more {o}", RESUME, (str(folder / f"{o} one"), "fsdp2", o)) for o in OPTIMIZERS),
    ]
    fewer = [resumed(*case) for case in CASES]
    return {
        "one": run_ranks(fsdp2.run, one, world=1, timeout=100),
        "two": run_ranks(fsdp2.run, two, world=2, timeout=150),
        "fewer": run_ranks(fsdp2.run, fewer, world=1, timeout=100),
    }


def _goes_on(resumed: dict[str, Any], saved: dict[str, Any]) -> None:
    assert resumed["counts"] == saved["counts"] == (7, 1)
    assert resumed["scales"] == saved["scales"][AT:]
    assert resumed["moments"].keys() == saved["moments"].keys()
    assert same(resumed["weights"], saved["weights"])
    assert same(resumed["moments"], saved["moments"])


@pytest.mark.parametrize(("optimizer", "form", "host"), CASES)
def test_as_many_processes_go_on_exactly(runs: Any, optimizer: str, form: str, host: str) -> None:
    """A single file goes on under DDP too, with the state of its optimizer."""
    for saved, resumed in zip(
        of_ranks(runs["two"], f"save {optimizer} {form}"),
        of_ranks(runs["two"], f"{optimizer} {form} {host}"),
        strict=True,
    ):
        assert saved["folder"] == (form == "shards")
        _goes_on(resumed, saved)
        if host == "fsdp2":
            assert same_weights(resumed["weights"], saved["weights"])


@pytest.mark.parametrize(("optimizer", "form", "host"), CASES)
def test_fewer_processes_go_on(runs: Any, optimizer: str, form: str, host: str) -> None:
    _goes_on(
        of_ranks(runs["fewer"], f"{optimizer} {form} {host}")[0],
        of_ranks(runs["two"], f"save {optimizer} {form}")[0],
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_more_processes_go_on(runs: Any, optimizer: str) -> None:
    saved = of_ranks(runs["one"], f"save {optimizer}")[0]
    for resumed in of_ranks(runs["two"], f"more {optimizer}"):
        _goes_on(resumed, saved)
