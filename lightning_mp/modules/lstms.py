"""LSTMs on a CPU whose oneDNN has none in the dtype of autocast: which ones, and a sentence for the one that is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lightning_mp.compat.torch import cpu_has_lstm, without_onednn
from lightning_mp.errors import PlanError
from lightning_mp.modules.patterns import Swapped, swap_all

#: what to write instead
FIX = "pin it: pins={'LSTM': 'fp32'}"


class LSTMWithoutKernel(Swapped):
    """An LSTM that oneDNN has no kernel for: a packed input runs without oneDNN, another one is refused in a sentence.

    torch takes oneDNN for a packed input only if all its sequences have one length, as in a batch by chance.
    """

    lmp_state = ("_lmp_lstm",)
    #: its name, and the dtype of autocast
    _lmp_lstm: tuple[str, str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward.

        Raises:
            PlanError: oneDNN has no kernel for it.
        """
        run, about = cast("Any", super()).forward, self.__dict__.get("_lmp_lstm")
        packed = isinstance(args[0] if args else kwargs.get("input"), PackedSequence)
        try:
            with without_onednn() if packed and about is not None else nullcontext():
                return run(*args, **kwargs)
        except RuntimeError as error:
            if about is None or "primitive descriptor" not in str(error):
                raise
            raise PlanError.of(problem(*about), FIX) from error


def problem(name: str, dtype: str) -> str:
    """Return what is wrong with the LSTM ``name``, as an error says it."""
    return f"nn.LSTM {name!r} in {dtype} on this CPU, whose oneDNN has none for inputs that are not packed"


def without_kernel(root: nn.Module, dtype: torch.dtype, pinned: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the LSTMs below ``root`` that autocast to ``dtype`` on this CPU may not run, by name, less the ``pinned``.

    A packed input takes another way, and nobody knows before the forward whether it is packed. So does an LSTM with
    projections, which is left out.
    """
    if cpu_has_lstm(dtype):
        return {}
    left_out = set(map(id, pinned))
    return {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, nn.LSTM) and not module.proj_size and id(module) not in left_out
    }


def apply(named: dict[str, nn.Module], dtype: str) -> Callable[[], None]:
    """Have each of ``named`` explain itself, in place; calling the result undoes it."""
    undo = [swap_all([module], LSTMWithoutKernel, _lmp_lstm=(name, dtype)) for name, module in named.items()]

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all
