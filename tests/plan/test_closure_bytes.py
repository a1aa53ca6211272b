"""An optimizer that takes ``closure=None`` costs what it costs under Lightning's own plugins: nothing is copied."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from conformance.optimizers import Lion
from lightning_mp.compat.torch import TorchDispatchMode
from support.manual import Manual
from support.models import FEATURES, Regression
from support.oracles import plan_for, stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt

WIDE = 4096


class Made(TorchDispatchMode):
    """Bytes of every tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inside = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in inside:
            self.bytes += result.untyped_storage().nbytes()
        return result


class _Weighed:
    """Each step's bytes, in ``made``."""

    def configure_optimizers(self: Any) -> Any:
        self.net = nn.Linear(FEATURES, WIDE)
        self.made: list[int] = []
        return Lion(self.parameters(), lr=1e-3)

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        with Made() as made:
            super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        self.made.append(made.bytes)


class Automatic(_Weighed, Regression):
    pass


class ByHand(_Weighed, Manual):
    pass


def _ignores(m: Any, batch: Any, batch_idx: int) -> None:
    optimizer = m.optimizers()
    optimizer.zero_grad()
    m.manual_backward(m.loss(batch))
    with Made() as made:
        optimizer.step()
    m.made.append(made.bytes)


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("way", ["automatic", "resumed", "manual"])
def test_a_step_makes_no_more_bytes_than_stocks(way: str, mode: str, tmp_path: Path) -> None:
    make = partial(ByHand, _ignores) if way == "manual" else Automatic
    ours, stock = make(), make()
    for module, precision in ((ours, {"plugins": [plan_for(mode)]}), (stock, stock_for(mode))):
        resumed = {}
        if way == "resumed":
            path = tmp_path / str(len(list(tmp_path.iterdir())))
            fit(module, **precision, max_steps=2, data=ResumableBatches(), callbacks=[SaveAt(path, 2)])
            resumed = {"ckpt_path": path / "2.ckpt"}
        fit(module, **precision, data=ResumableBatches(), max_steps=4, **resumed)
    weight = 4 * FEATURES * WIDE
    assert len(ours.made) == len(stock.made) > 0
    assert all(one <= other + weight // 20 for one, other in zip(ours.made, stock.made, strict=True))
