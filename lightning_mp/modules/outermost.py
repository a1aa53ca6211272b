"""``OutermostCalls``: hooks around the outermost forward pass of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_mp.compat.torch import in_backward


class OutermostCalls:
    """Hooks that call ``before`` and ``after`` around the outermost forward in ``root``.

    ``root`` and all modules in it count. A forward within the forward of another one does not
    count. ``before`` gets the module. ``after`` gets the module and its output, ``None`` if the
    forward failed. If ``after`` returns a value other than ``None``, it replaces the output. A
    forward that a backward pass recomputes does not count. In a run the hooks are torch's global
    ones, which cost nothing while they are paused.
    """

    def __init__(
        self,
        root: nn.Module,
        before: Callable[[nn.Module], None],
        after: Callable[[nn.Module, Any], Any],
    ) -> None:
        self._modules = set(root.modules())
        self._before, self._after = before, after
        #: the module of the outermost forward, and its depth, because a module may call itself
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._handles: list[Any] = []

    def start(self) -> None:
        """Register the global hooks, unless hooks are registered."""
        if not self._handles:
            leave = register_module_forward_hook(self._leave, always_call=True)
            self._handles = [register_module_forward_pre_hook(self._enter), leave]

    def keep_on_modules(self) -> None:
        """Register hooks on the modules instead of global ones. They may stay after the run."""
        self.stop()
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Remove the hooks. ``after`` is not called for a forward that is under way."""
        while self._handles:
            self._handles.pop().remove()
        self._outermost, self._depth = None, 0

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Remove the hooks within the context.

        At its end, register the global ones if there were any hooks.
        """
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
