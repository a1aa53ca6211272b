"""``BetweenSteps``: gather weights for forward passes of hooks and callbacks between steps."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat.torch_sharding import GatherExtension, HalfGather, Units, before_backward_from
from lightning_mp.modules.outermost import OutermostCalls
from lightning_mp.numerics.dtypes import tensors_in

#: the attribute of a module that keeps its ``BetweenSteps`` from the end of a run to the next run
_KEPT_AS = "_lmp_between_steps"


class BetweenSteps:
    """Hooks that let code call modules of ``root`` outside of the Trainer's steps, as under DDP.

    The root's own weights are gathered when such a call begins, and all weights are resharded when
    it ends. A hook then writes to the shards, and the next step gathers the written values. Weights
    of FP8 are gathered as they are stored. Under autocast to ``dtype``, weights of ``halves`` are
    gathered in half. Otherwise they are gathered as they are stored, because nothing casts the
    inputs.
    """

    def __init__(
        self,
        root: nn.Module,
        halves: Sequence[HalfGather],
        in_fp8: Sequence[GatherExtension],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._module = root
        self._halves, self._in_fp8 = halves, in_fp8
        self._device, self._dtype = device, dtype
        self._units = Units(root)
        self._root: Any = root if isinstance(root, FSDPModule) else None
        units = [part for part in root.modules() if isinstance(part, FSDPModule)]
        #: modules whose weights torch gathers itself
        self._in_units = {root}.union(*(part.modules() for part in units if part is not root))
        #: True while ``halves`` are gathered in the half dtype
        self._in_half = True
        #: weights that steps gather in FP8, and that are gathered as they are stored until the next
        #: step
        self._taken_out: list[GatherExtension] = []
        self._calls = OutermostCalls(root, self._begin, self._end)
        self._call = ExitStack()

    def start(self) -> None:
        """Register the hooks, and remove those that an earlier run left on the modules."""
        before: BetweenSteps | None = vars(self._module).pop(_KEPT_AS, None)
        if before is not None:
            before._calls.stop()
        self._calls.start()

    def end_run(self) -> None:
        """Move the hooks to the modules if ``root`` is an FSDP2 unit, else remove them.

        The module stays sharded after the run, and ``on_fit_end`` is called after the strategy's
        teardown. Switches between half or FP8 and stored weights are no longer made.
        """
        self._halves, self._in_fp8 = (), ()
        self._taken_out.clear()
        self._calls.stop()
        if self._root is not None:
            self._calls.keep_on_modules()
            vars(self._module)[_KEPT_AS] = self

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Gather weights as the plan declares. Within the context the hooks are paused."""
        self.gather_as_in_steps()
        with self._calls.paused():
            yield

    def gather_as_in_steps(self) -> None:
        """Gather weights as the plan declares from now on.

        If that is a change, reshard all weights.
        """
        if not self._in_half:
            self._units.reshard()
            self._in_half = True
            for weight in self._halves:
                weight.use(half=True)
        if self._taken_out:
            self._units.reshard()
            while self._taken_out:
                self._taken_out.pop().use(True)

    def _gather_as_stored(self, *, halves: bool) -> None:
        """Gather FP8 weights as they are stored from now on.

        If that is a change, reshard all weights. If ``halves``, the weights of ``self._halves`` are
        gathered as they are stored too. Otherwise they are gathered in half.
        """
        taken_out = [weight for weight in self._in_fp8 if weight.extended]
        if taken_out or self._in_half == halves:
            self._units.reshard()
        for weight in taken_out:
            weight.use(False)
        self._taken_out += taken_out
        if self._in_half == halves:
            self._in_half = not halves
            for weight in self._halves:
                weight.use(half=not halves)

    def _begin(self, module: nn.Module) -> None:
        """Before an outermost call: choose the dtype of gathers, and gather the root's weights."""
        if torch.is_inference_mode_enabled():  # later steps reuse tensors that a gather allocates
            self._call.enter_context(torch.inference_mode(False))
            self._call.enter_context(torch.no_grad())
        # Without the fast path, torch's attention layers call their children, and the children's
        # hooks gather.
        self._call.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        kind = self._device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self._dtype
        self._gather_as_stored(halves=not casts)
        if self._root is not None and module not in self._in_units:
            self._root.unshard()

    def _end(self, module: nn.Module, output: Any) -> None:
        """After it: reshard.

        A backward pass from the output gathers the same way as the call did.
        """
        self._call.close()
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        halves = not self._in_half
        for tensor in differentiable if torch.is_grad_enabled() else ():
            tensor.register_hook(lambda _: self._gather_as_stored(halves=halves))
            if self._root is not None and module not in self._in_units:
                before_backward_from(tensor, self._root)
        self._units.reshard()
