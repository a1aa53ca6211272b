"""Where a non-finite value was born: one forward and backward pass, watched module by module."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import in_backward
from lightning_mp.numerics.dtypes import floating_in
from lightning_mp.numerics.grads import local

_CAUSES = {
    "forward": "the output of that module, from finite inputs: a non-finite weight, or an overflow",
    "loss": "the loss, from finite outputs: a logarithm or a division in it",
    "after backward": "that gradient was changed after the backward pass, which was finite when the batch was run "
    "again: by a hook, a clip or the sum over ranks",
    "backward": "the backward pass of that module, from finite gradients: an overflow, or a division",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The module in which a non-finite value first appeared, in which pass, and the parameter it reached first.

    In phase ``"loss"`` it is the module that ran last before the loss. ``input_bad``: its input was non-finite already,
    by the batch or an operation between ``after``, the module before it, and it.
    """

    module: str
    parameter: str | None
    phase: Literal["forward", "loss", "backward", "after backward"]
    input_bad: bool = False
    after: str | None = None

    @property
    def cause(self) -> str:
        """What is likely to have happened there."""
        if self.input_bad:
            between = "" if self.after is None else f", or an operation between module {self.after!r} and that one"
            return f"the batch{between}, as the input of that module was non-finite already"
        return _CAUSES[self.phase]

    def __str__(self) -> str:
        parameter = f", parameter {self.parameter!r}" if self.parameter else ""
        return f"module {self.module!r}{parameter}: {self.cause}"


def locate(root: nn.Module, run: Callable[[], Tensor | None], *, backward: bool = True) -> Origin | None:
    """Where the first non-finite value of ``run`` appears, or ``None`` if everything stayed finite.

    ``run`` does one forward through modules of ``root`` and one backward, and returns the loss; with ``backward=False``
    a forward only, without recording. Every output and gradient is read back to the host.
    """
    watch = _Watch(root, backward)
    with torch.compiler.set_stance("force_eager"), watch:  # what is compiled already runs no new hook
        loss = run()
    return watch.verdict(loss)


def from_parameters(root: nn.Module) -> Origin | None:
    """The first module, in definition order, with a non-finite parameter of its own."""
    for name, parameter in root.named_parameters():
        if parameter.is_floating_point() and not _finite(parameter):
            return Origin(name.rpartition(".")[0], name, "forward")
    return None


def from_gradients(
    root: nn.Module, gradient_of: Callable[[Any], Tensor | None] = lambda parameter: parameter.grad
) -> Origin | None:
    """The best guess from the gradients alone: the last parameter in definition order whose gradient is non-finite."""
    gradients = ((name, gradient_of(parameter)) for name, parameter in root.named_parameters())
    bad = [name for name, gradient in gradients if gradient is not None and not _finite(gradient)]
    return Origin(bad[-1].rpartition(".")[0], bad[-1], "backward") if bad else None


class _Watch:
    """Hooks on every module's output, on the gradients of these outputs, and on every parameter's gradient."""

    def __init__(self, root: nn.Module, backward: bool) -> None:
        self._root, self._with_backward = root, backward
        self._names = {module: name or type(module).__name__ for name, module in root.named_modules()}
        self._handles: list[Any] = []
        self._watched: dict[int, Tensor] = {}  # holds them, so that no id is used twice
        self._forward: tuple[str, nn.Module, bool, str | None] | None = None
        self._last: str | None = None
        self._last_finite: str | None = None
        self._backward: str | None = None
        self._parameter: str | None = None

    def __enter__(self) -> None:
        for module in self._names:
            if module is not self._root or len(self._names) == 1:  # else it would answer for every module in it
                self._handles.append(module.register_forward_hook(self._on_output, with_kwargs=True))
        for name, parameter in self._root.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_parameter, name)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._watched.clear()

    def verdict(self, loss: Tensor | None) -> Origin | None:
        if loss is None or not _finite(loss):
            if self._forward is not None:
                name, module, input_bad, after = self._forward
                return Origin(name, self._parameter_of(name, module), "forward", input_bad, after=after)
            if loss is not None and self._last is not None:
                return Origin(self._last, self._parameter, "loss")
        if self._backward is not None:
            return Origin(self._backward, self._parameter, "backward")
        return None

    def _on_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._with_backward and (in_backward() or not torch.is_grad_enabled()):
            return  # what checkpointing runs again in the backward pass, or an evaluation on the side
        name, tensors, before = self._names[module], floating_in(output), self._last
        if next(module.children(), None) is None:
            self._last = name
        with torch.no_grad():  # looking saves no tensor that checkpointing would miss when it runs the module again
            if self._forward is None and not all(_healthy(tensor, module) for tensor in tensors):
                input_bad = not all(map(_finite, floating_in((args, kwargs))))
                self._forward = name, module, input_bad, before if input_bad else None
        for tensor in tensors:
            if tensor.requires_grad and id(tensor) not in self._watched:
                self._watched[id(tensor)] = tensor
                self._handles.append(tensor.register_hook(partial(self._on_output_gradient, name)))

    def _on_output_gradient(self, name: str, gradient: Tensor) -> None:
        if self._backward is None:
            if _finite(gradient):
                self._last_finite = name
            else:  # made by the backward of whatever used this output: the module last seen healthy
                self._backward = self._last_finite or name

    def _on_parameter(self, name: str, parameter: Tensor) -> None:
        if self._parameter is None and parameter.grad is not None and not _finite(parameter.grad):
            self._parameter = name
            self._backward = self._backward or name.rpartition(".")[0]

    def _parameter_of(self, name: str, module: nn.Module) -> str | None:
        own = {f"{name}.{key}": parameter for key, parameter in module.named_parameters(recurse=False)}
        bad = [key for key, parameter in own.items() if not _finite(parameter)]
        return next(iter([*bad, *own]), self._parameter)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor)).all())  # local: a rank may look alone


def _healthy(tensor: Tensor, module: nn.Module) -> bool:
    """A module without parameters may well hand on ``-inf`` (a mask); a product with weights may not."""
    if next(module.parameters(), None) is not None:
        return _finite(tensor)
    tensor = local(tensor)
    return not bool(torch.isnan(tensor).any() | torch.isposinf(tensor).any())
