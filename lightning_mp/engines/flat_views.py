"""What FSDP1 leaves out for parameters within a flat one: to run their hooks, and to leave unused ones unmoved."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.engines import reduce
from lightning_mp.errors import Fault, PlanError


class FlatViews:
    """Watches the views of flat parameters with which ``model`` computes, until ``release``.

    A step costs one all-reduce of a flag a parameter. The host reads it only where one was not used on this rank.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        handles = sharding_compat.flat_handles(model)
        self._members: list[Any] = [member for handle in handles for member in sharding_compat.flat_originals(handle)]
        self._undo = [sharding_compat.after_views(handle, self._watch) for handle in handles]
        #: by ``id``, of which members a gradient came in since the last step
        self._used: set[int] = set()

    def release(self) -> None:
        """Let go of the views."""
        for undo in self._undo:
            undo()
        self._undo, self._members = [], []

    def _watch(self, member: Any, view: Tensor) -> None:
        if member.requires_grad and view.requires_grad:
            view.register_hook(partial(self._gradient, member))

    def _gradient(self, member: Any, gradient: Tensor) -> Tensor:
        """The gradient of a view as the user's hooks on the parameter make it."""
        self._used.add(id(member))
        return sharding_compat.through_hooks(member, gradient)

    def refuse_hooks(self) -> None:
        """Look for hooks that would run when the gradient is accumulated, which it is in the flat parameter alone.

        Raises:
            PlanError: there is one.
        """
        if any(map(sharding_compat.has_accumulation_hooks, self._members)):
            fault = Fault(
                "register_post_accumulate_grad_hook(...) on a parameter under FSDP1, which never calls it",
                "register_hook(...) on parameters, or on_before_optimizer_step",
                "use one of these, or strategy='mp_fsdp2'",
            )
            raise PlanError([fault])

    def settle(self) -> None:
        """Before a step: take the gradient away from parameters that no rank used, so that no optimizer moves them."""
        flags = torch.tensor([id(member) in self._used for member in self._members], dtype=torch.uint8)
        there = flags.to(self._device)
        reduce.max_over_ranks_(there)
        if not flags.all():  # on the host
            for member, used in zip(self._members, there.tolist(), strict=True):
                if not used:
                    member.grad = None
        self._used.clear()
