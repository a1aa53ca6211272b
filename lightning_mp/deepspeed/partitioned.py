"""What hooks do with weights that ZeRO-3 holds in partitions: writes are refused, and reads of nothing are said."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat import patched
from lightning_mp.compat.lightning import rank_zero_warn
from lightning_mp.compat.torch import function_caller
from lightning_mp.errors import Fault

_DATA: Any = cast("Any", Tensor.data)
#: packages that may write to partitions
_TRUSTED = ("deepspeed.", "lightning_mp.")
#: methods whose names end as those of writes do, and which write no value
_NO_WRITES = {"requires_grad_", "share_memory_"}
_ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
#: functions that compute from a value, as averages and copies of weights do
_READS = {
    *("add", "sub", "mul", "div", "lerp", "clamp", "clone", "norm", "sum", "add_", "sub_", "lerp_", "copy_"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("_foreach_add", "_foreach_mul", "_foreach_add_", "_foreach_lerp_", "_foreach_copy_"),
}
#: hooks in which checkpoints are written and read
_UNWATCHED = {"on_save_checkpoint", "on_load_checkpoint"}


class PartitionedWeights(TorchFunctionMode):
    """Within it, a write to a weight that ZeRO-3 has split raises, and a computation from an empty one is said once.

    Between steps such a weight is empty, or a copy that the next step replaces. A write through ``weight.data`` leaves
    no trace, so that only the call itself shows it.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in named}
        #: the number of ``GatheredParameters`` that the program is in
        self._gathered = 0
        self._hook = "training_step"
        self._said = False

    def count_gathered(self, change: int) -> None:
        """Note that a ``GatheredParameters``, in which writes are kept, begins (1) or ends (-1)."""
        self._gathered += change

    @contextmanager
    def within(self, action: str) -> Generator[None, None, None]:
        """Watch a hook, which the Trainer's profiler calls ``action``, unless it writes nothing to weights."""
        owner, _, hook = action.partition("]")[2].rpartition(".")
        if hook.startswith("on_") and hook not in _UNWATCHED:
            around, self._hook = self._hook, f"{owner.partition('{')[0]}.{hook}"
            try:
                with self:
                    yield
            finally:
                self._hook = around
        else:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = getattr(func, "__name__", "")
        in_place = kind.endswith("_") and not kind.endswith("__") and kind not in _NO_WRITES
        writes = func == _DATA.__set__ or kind in _ASSIGNMENTS or in_place
        if writes and args and not self._gathered and (name := self._name(args[0])) is not None and self._is_users():
            raise RuntimeError(
                str(
                    Fault(
                        f"{name!r} written to in {self._hook} with ZeRO-3, which holds it in partitions: nothing would "
                        "be changed",
                        fix="write within deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)",
                    )
                )
            )
        if kind in _READS and not self._said and not self._gathered:
            self._say_empty(args)
        result = func(*args, **(kwargs or {}))
        if (func == _DATA.__get__ or kind == "detach") and isinstance(result, Tensor):
            cast("Any", result).lmp_part_of = self._name(args[0])
        return result

    def _name(self, value: Any) -> str | None:
        """The name of the weight that is written through ``value``, or of the first one in a list of them."""
        if isinstance(value, (list, tuple)):
            names = map(self._name, cast("list[Any]", value))
            return next((name for name in names if name is not None), None)
        return self._names.get(id(value)) or getattr(value, "lmp_part_of", None)

    def _say_empty(self, args: Any) -> None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        tensors += [one for value in args if isinstance(value, (list, tuple)) for one in cast("list[Any]", value)]
        empty = [value for value in tensors if isinstance(value, Tensor) and not value.numel()]
        name = next((name for value in empty if (name := self._name(value)) is not None), None)
        if name is None or not self._is_users():
            return
        self._said = True
        rank_zero_warn(
            f"{self._hook} computes from {name!r}, which is empty there: ZeRO-3 holds it in partitions. An average of "
            "weights that is made so never moves (said once a run). Write with deepspeed.zero.GatheredParameters("
            "list(module.parameters())) around it, or use strategy='mp_fsdp2'."
        )

    @staticmethod
    def _is_users() -> bool:
        """True if neither DeepSpeed nor this package calls."""
        return not function_caller().startswith(_TRUSTED)


def watched_hooks(trainer: Any, weights: PartitionedWeights) -> AbstractContextManager[None]:
    """Within, each hook of callbacks and of the module runs in ``weights``; the Trainer's profiler is around each."""
    own = trainer.profiler.profile

    @contextmanager
    def profile(action: str) -> Generator[Any, None, None]:
        is_hook = action.startswith(("[Callback]", "[LightningModule]"))
        with own(action) as result, weights.within(action) if is_hook else nullcontext():
            yield result

    return patched(trainer.profiler, profile=profile)
