"""Whole weights into a module that DeepSpeed may have split: what ``load_state_dict`` takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from lightning_mp.deepspeed.strategy import load_full_state


class Renamed(nn.Module):
    """Calls ``new`` what an earlier version of it saved as ``old``."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "new.")] = state.pop(name)


def _net() -> nn.Sequential:
    return nn.Sequential(Renamed(), nn.BatchNorm1d(2))


def _saved() -> dict[str, Any]:
    return {name: torch.ones_like(tensor) for name, tensor in _net().state_dict().items()}


def test_checkpoints_of_earlier_versions_of_a_module_load() -> None:
    """Its own hooks rename, and a batch norm does without the count of batches that torch once did not save."""
    state = {name.replace("new", "old"): tensor for name, tensor in _saved().items() if "num_batches" not in name}
    plain, net = _net(), _net()
    plain.load_state_dict(state)
    load_full_state(net, state, strict=True)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert "0.old.weight" in state
