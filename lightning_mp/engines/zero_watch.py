"""What users do that a ZeRO optimizer never hears of: reading gradients, changing weights, leaving parameters out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.errors import Fault

_GRAD: Any = cast("Any", Tensor.grad)
#: who may ask: they know where ZeRO keeps gradients
_KNOW = ("deepspeed.", "lightning_mp.")


class GradientsElsewhere(TorchFunctionMode):
    """Within it, ``parameter.grad`` of a trained parameter is refused where ZeRO has moved it into its partitions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = func in (_GRAD.__get__, _GRAD.__set__) and isinstance(args[0], nn.Parameter)
        if touched and args[0].requires_grad and (func == _GRAD.__set__ or result is None) and not _known():
            fault = Fault(
                "parameter.grad before the step, with ZeRO, which has moved the gradients into its partitions",
                "hooks and steps that leave gradients alone, Trainer(gradient_clip_val=...), self.clip_gradients(...), "
                "and hooks of a tensor, parameter.register_hook(...)",
                "clip by the Trainer, read deepspeed.utils.safe_get_full_grad(parameter), or use strategy='mp_fsdp2'",
            )
            raise RuntimeError(str(fault))
        return result


def _known() -> bool:
    frame: Any = inspect.currentframe()  # this, the mode, and who asks
    return frame.f_back.f_back.f_globals.get("__name__", "").startswith(_KNOW)


class Weights:
    """The trained parameters between two steps: whether users changed them, and which had a gradient."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decayed: Mapping[int, bool]) -> None:
        every = dict(named)
        self._named = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in every.items() if not parameter.requires_grad}
        #: by id: whether its group has weight decay
        self._decayed = decayed
        self._seen: set[int] = set()
        self._ever: set[int] = set()
        self._compared = False
        self._versions = self._now()
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self._named.values()]

    def _note(self, parameter: Tensor) -> None:
        self._seen.add(id(parameter))

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._named.values()]

    def refuse_apart(self) -> None:
        """After the first backward pass, ask whether all ranks have gradients of the same parameters.

        Raises:
            RuntimeError: they have not, on every rank: ZeRO would add up different parameters, or wait for ever.
        """
        if self._compared or not dist.is_initialized():
            return
        self._compared = True
        device = next(iter(self._named.values())).device
        mask = torch.tensor([id(p) in self._seen for p in self._named.values()], dtype=torch.float32, device=device)
        somewhere, everywhere = mask.clone(), mask.clone()
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        apart = [name for name, differ in zip(self._named, (somewhere != everywhere).tolist(), strict=True) if differ]
        if apart:
            fault = Fault(
                f"a gradient of {apart[0]!r} and {len(apart) - 1} others on some ranks only, with ZeRO, which sums "
                "what every rank has",
                "steps that use the same parameters on every rank",
                "add 0 times the parameters that a rank does not use to its loss, or use strategy='mp_ddp' with "
                "find_unused_parameters=True",
            )
            raise RuntimeError(str(fault))

    def changed(self) -> bool:
        """Whether any was written to in place since the last step."""
        return self._now() != self._versions

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
        """A step was made."""
        self._ever |= self._seen
        self._seen.clear()
        self._versions = self._now()

    def release(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def keeps_moments(optimizer: Any) -> bool:
    """Whether a gradient of 0 may still move a weight."""
    return any(isinstance(value, Tensor) and value.ndim for s in optimizer.state.values() for value in s.values())
