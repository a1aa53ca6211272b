"""What users do that a ZeRO optimizer never hears of: reading gradients, changing weights, leaving parameters out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.deepspeed import after_gathered_change, is_partitioned, stays_gathered
from lightning_mp.errors import Fault
from lightning_mp.modules.half_copies import HalfCopy
from lightning_mp.numerics.dtypes import as_plain
from lightning_mp.numerics.nested import leaves

_GRAD: Any = cast("Any", Tensor.grad)
_DATA: Any = cast("Any", Tensor.data)
#: who may ask: they know where ZeRO keeps gradients
_KNOW = ("deepspeed.", "lightning_mp.")
#: clip_grad_norm_ and clip_grad_value_, which do nothing where gradients are None
_CLIPS = "torch.nn.utils.clip_grad"


class GradientsElsewhere(TorchFunctionMode):
    """Within it, ``parameter.grad`` of a trained parameter is None, since ZeRO has moved it into its partitions.

    Who reads it is warned, once; who sets it, or clips by it, would change nothing, and is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = func in (_GRAD.__get__, _GRAD.__set__) and isinstance(args[0], nn.Parameter)
        if touched and args[0].requires_grad and (func == _GRAD.__set__ or result is None):
            self._meet(_reader(), func == _GRAD.__set__)
        return result

    def _meet(self, reader: str, sets: bool) -> None:
        if reader.startswith(_KNOW):
            return
        if sets or reader == _CLIPS:
            fault = Fault(
                f"{'parameter.grad set' if sets else 'gradients clipped by hand'} before the step, with ZeRO, which "
                "has moved the gradients into its partitions",
                "Trainer(gradient_clip_val=...), self.clip_gradients(...), and hooks of a tensor, "
                "parameter.register_hook(...)",
                "clip by the Trainer, or use strategy='mp_fsdp2'",
            )
            raise RuntimeError(str(fault))
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reader} reads parameter.grad, which is None here: ZeRO has moved the gradients into its partitions "
                "(said once a run). deepspeed.utils.safe_get_full_grad(parameter), called on every rank, has the "
                "gradient times the loss scale; plan.last_grad_norm has the norm of all after the step.",
                stacklevel=3,
            )


def _reader() -> str:
    """The module whose code reads or sets a gradient."""
    frame: Any = inspect.currentframe()  # this, the mode, and who reads
    return str(frame.f_back.f_back.f_globals.get("__name__", ""))


@as_plain
class _Partitioned(nn.Parameter):
    """A parameter of ZeRO-3's, which notes what a user was given as its data while it is in partitions."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        held: Tensor = _DATA.__get__(self)
        asks: Any = inspect.currentframe()
        kept = not held.numel() or stays_gathered(self)  # else to keep it would keep a whole weight in memory
        if kept and not asks.f_back.f_globals.get("__name__", "").startswith(_KNOW):
            vars(self).setdefault("handed_out", []).append((held, held._version))
        return held

    @data.setter
    def data(self, data: Tensor) -> None:
        _DATA.__set__(self, data)


def _was_written_to(parameter: nn.Parameter, version: int) -> bool:
    handed_out: list[tuple[Tensor, int]] = vars(parameter).pop("handed_out", [])
    return parameter._version != version or any(held._version != before for held, before in handed_out)


class Weights:
    """The trained parameters between two steps: whether users changed them, and which had a gradient."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decayed: Mapping[int, bool]) -> None:
        every = dict(named)
        self._named = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in every.items() if not parameter.requires_grad}
        #: by id: whether its group has weight decay
        self._decayed = decayed
        self._seen: dict[int, None] = {}
        self._ever: set[int] = set()
        self._compared = False
        #: in-place writes to partitions (ZeRO-3), where a gathered parameter that a user changed becomes one again
        self._versions = {name: p._version for name, p in self._named.items() if is_partitioned(p)}
        split = [self._named[name] for name in self._versions]
        self._undo = [after_gathered_change(parameter, self._heard) for parameter in split]
        for parameter in split:
            parameter.__class__ = _Partitioned
        #: the same of half copies, which nobody's master follows
        self._copies = {name: p._version for name, p in self._named.items() if isinstance(p, HalfCopy)}
        self._changed = False
        self._undo += [p.register_post_accumulate_grad_hook(self._note).remove for p in self._named.values()]

    def _note(self, parameter: Tensor) -> None:
        self._seen[id(parameter)] = None

    def _heard(self) -> None:
        self._changed = True
        self.loaded()

    def loaded(self) -> None:
        """What was written to up to now is where it belongs: a checkpoint was loaded."""
        for versions in (self._versions, self._copies):
            versions |= {name: self._named[name]._version for name in versions}
        for name in (*self._versions, *self._copies):
            vars(self._named[name]).pop("handed_out", None)

    @property
    def partitioned(self) -> bool:
        """Whether ZeRO-3 has split the weights themselves."""
        return bool(self._versions)

    def take_change(self) -> bool:
        """Whether a user changed partitions since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def refuse_lost(self) -> None:
        """Look whether a user changed what is no longer there.

        Raises:
            RuntimeError: a weight was written to while it was partitioned, which changes nothing (ZeRO-3), or a half
                copy, which the next step overwrites (ZeRO-1 and 2).
        """
        written = [name for name, version in self._copies.items() if _was_written_to(self._named[name], version)]
        if written:
            fault = Fault(
                f"{written[0]!r} and {len(written) - 1} others written to between steps with ZeRO, which holds them in "
                "half precision beside fp32 masters",
                "deepspeed.utils.safe_set_full_fp32_param(parameter, value), or fp32 weights",
                "write so, or make the strategy with half_copies=False",
            )
            raise RuntimeError(str(fault))
        lost = [name for name, version in self._versions.items() if _was_written_to(self._named[name], version)]
        if lost:
            fault = Fault(
                f"{lost[0]!r} and {len(lost) - 1} others written to between steps with ZeRO-3, which holds them in "
                "partitions: nothing was changed",
                "writing to weights within deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)",
                "write so, or use strategy='mp_deepspeed_zero2'",
            )
            raise RuntimeError(str(fault))

    def refuse_apart(self) -> None:
        """After the first backward pass, ask whether all ranks have gradients of the same parameters.

        Raises:
            RuntimeError: they have not, on every rank: ZeRO would add up different parameters, or wait for ever.
        """
        if not self._compared:
            self._compared = True
            self._compare({one: place for place, one in enumerate(self._seen, 1)})

    def refuse_apart_behind(self, loss: Tensor) -> None:
        """The same before it, by the graph behind ``loss``: what is recomputed as a whole is not seen there.

        Raises:
            RuntimeError: they will not have.
        """
        if not self._compared:
            self._compare(dict.fromkeys(leaves(loss), 1))

    def _compare(self, places: Mapping[int, int]) -> None:
        """Each of them, by ``id``, in the same place everywhere: gradients are summed in the order they come in."""
        if not dist.is_initialized():
            return
        device = next(iter(self._named.values())).device
        mask = torch.tensor([places.get(id(p), 0) for p in self._named.values()], device=device)
        somewhere, everywhere = mask.clone(), mask.clone()
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        apart = [name for name, differ in zip(self._named, (somewhere != everywhere).tolist(), strict=True) if differ]
        if apart:
            fault = Fault(
                f"a gradient of {apart[0]!r} and {len(apart) - 1} others on some ranks only, or in another order, with "
                "ZeRO, which sums what every rank has as it comes in",
                "steps that use the same parameters in the same order on every rank",
                "add 0 times the parameters that a rank does not use to its loss, or use strategy='mp_ddp' with "
                "find_unused_parameters=True",
            )
            raise RuntimeError(str(fault))

    def refuse_unfrozen(self) -> None:
        """Look whether any was unfrozen after ZeRO had taken what was trained.

        Raises:
            RuntimeError: one was, and would stay as it is.
        """
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            fault = Fault(
                f"{unfrozen[0]!r} and {len(unfrozen) - 1} others unfrozen in a run with ZeRO, which partitions what is "
                "trained when the run starts",
                "the same parameters trained from its first step to its last",
                "unfreeze before trainer.fit(), and begin a second run there, or use strategy='mp_fsdp2'",
            )
            raise RuntimeError(str(fault))

    def refuse_left_out(self, moves: bool) -> None:
        """Look whether each that a step would change had a gradient; ``moves``: the optimizer keeps moments.

        Raises:
            RuntimeError: one had none, and would be decayed or moved by what is left of earlier gradients.
        """
        left_out = [
            name
            for name, parameter in self._named.items()
            if id(parameter) not in self._seen
            and (self._decayed.get(id(parameter)) or (moves and id(parameter) in self._ever))
        ]
        if left_out:
            fault = Fault(
                f"no gradient for {left_out[0]!r} and {len(left_out) - 1} others in this step, with ZeRO, which would "
                "decay them, or move them by earlier gradients",
                "steps that use every parameter that is trained, or weight decay of 0 for what is never used",
                "freeze what is not used, requires_grad_(False), or use strategy='mp_ddp'",
            )
            raise RuntimeError(str(fault))

    def stepped(self) -> None:
        """A step was made, which writes to half copies, or to the flat tensor that they are views of."""
        self._copies |= {name: self._named[name]._version for name in self._copies}
        self._ever |= self._seen.keys()
        self._seen.clear()

    def release(self) -> None:
        """Take the hooks off, and leave parameters as DeepSpeed made them."""
        for name in self._versions:
            self._named[name].__class__ = nn.Parameter
        for undo in self._undo:
            undo()
