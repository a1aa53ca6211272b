"""Code around the forward passes of a model's modules, run once for the outermost of nested ones."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_mp.compat.torch import in_backward


class OutermostCalls:
    """Calls ``before`` and ``after`` around the outermost forward of a module below ``root``.

    ``before`` is given the module, ``after`` the module and its output: ``None`` if the forward
    failed. What ``after`` returns takes the output's place, unless it is ``None``. The recomputation
    of a forward in a backward pass is no call. In a run the hooks are torch's global ones, so that
    they cost nothing while they are paused.
    """

    def __init__(
        self,
        root: nn.Module,
        before: Callable[[nn.Module], None],
        after: Callable[[nn.Module, Any], Any],
    ) -> None:
        self._modules = set(root.modules())
        self._before, self._after = before, after
        #: the module whose call is the outermost one, and how often it is entered: it may call itself
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._handles: list[Any] = []

    def start(self) -> None:
        """Call them from now on."""
        if not self._handles:
            leave = register_module_forward_hook(self._leave, always_call=True)
            self._handles = [register_module_forward_pre_hook(self._enter), leave]

    def keep_on_modules(self) -> None:
        """Call them from hooks of the modules themselves instead, which may stay when the run is over."""
        self.stop()
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Remove the hooks; a call that is under way is forgotten."""
        while self._handles:
            self._handles.pop().remove()
        self._outermost, self._depth = None, 0

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Within, neither is called."""
        started = bool(self._handles)
        self.stop()
        try:
            yield
        finally:
            if started:
                self.start()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if self._outermost is None:
            if module not in self._modules or in_backward():
                return
            self._outermost = module
            self._before(module)
        self._depth += module is self._outermost

    def _leave(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        if module is not self._outermost:
            return None
        self._depth -= 1
        if self._depth > 0:
            return None
        self._outermost, self._depth = None, 0
        return self._after(module, output)
