"""LSTMs on a CPU whose oneDNN has no LSTM in autocast's dtype: find them, and explain torch's error."""

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

#: the advice for such an LSTM
FIX = "pin it: pins={'LSTM': 'fp32'}"


class LSTMWithoutKernel(Swapped):
    """Mix-in of an LSTM for which oneDNN has no kernel.

    A packed input runs without oneDNN, because torch uses oneDNN for it only if all its sequences
    happen to have one length. For another input torch's error is explained.
    """

    lmp_state = ("_lmp_lstm",)
    #: the module's name, and autocast's dtype
    _lmp_lstm: tuple[str, str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward.

        Raises:
            PlanError: oneDNN has no kernel for the call.
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
    """Return the problem with the LSTM ``name`` as an error's text."""
    return f"nn.LSTM {name!r} in {dtype} on this CPU, whose oneDNN has none for inputs that are not packed"


def without_kernel(root: nn.Module, dtype: torch.dtype, pinned: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the LSTMs below ``root`` that may fail under autocast to ``dtype`` on this CPU, by name.

    They run with packed inputs, which are only known in the forward. LSTMs with projections are
    left out, because torch runs them without oneDNN, and so are ``pinned`` modules. If oneDNN has
    an LSTM in ``dtype``, the result is empty.
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
    """Let each LSTM of ``named`` explain its error, in place, and return a function that undoes it.

    ``dtype`` is the name of autocast's dtype.
    """
    undo = [swap_all([module], LSTMWithoutKernel, _lmp_lstm=(name, dtype)) for name, module in named.items()]

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all
