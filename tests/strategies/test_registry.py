"""The ``mp_*`` names in Lightning's registry: there after a plain import, whichever package comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_mp.strategies.registry import STRATEGIES

ORDERS = {
    "ours first": "import lightning_mp, lightning.pytorch",
    "Lightning first": "import lightning.pytorch, lightning_mp",
    "a part of ours first": "from lightning_mp.policy import Pin; import lightning.pytorch.strategies",
    "the Trainer alone": "import lightning_mp; from lightning.pytorch import Trainer",
}
LIST = "from lightning.pytorch.strategies import StrategyRegistry as r; print(*r.available_strategies())"


def _after(statements: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_name_is_registered(order: str) -> None:
    assert {f"mp_{name}" for name in STRATEGIES} <= set(_after(f"{order}; {LIST}"))


def test_nothing_is_left_waiting_once_lightning_is_there() -> None:
    after = "import lightning_mp, lightning.pytorch, sys; print(*(type(f).__name__ for f in sys.meta_path))"
    assert "_Waiting" not in _after(after)


def test_lightnings_module_keeps_its_own_loader() -> None:
    (loader,) = _after(
        "import lightning_mp, lightning.pytorch.strategies as s; print(type(s.__spec__.loader).__name__)"
    )
    assert loader == "SourceFileLoader"


def test_a_reload_registers_again_without_complaint() -> None:
    assert "mp_ddp" in _after(
        f"import importlib, lightning.pytorch, lightning_mp; importlib.reload(lightning_mp); {LIST}"
    )
