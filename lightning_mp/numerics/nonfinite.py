"""The origin of a non-finite value, by watching one forward and backward pass module by module."""

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
    """The module and the pass in which a non-finite value first appeared, and the first parameter that it reached.

    In phase ``"loss"`` the module is the last one before the loss. ``input_bad``: the module's input was non-finite
    already, because of the batch, or of an operation between the module ``after`` and this one.
    """

    module: str
    parameter: str | None
    phase: Literal["forward", "loss", "backward", "after backward"]
    input_bad: bool = False
    after: str | None = None

    @property
    def cause(self) -> str:
        """Return the likely cause, in words."""
        if self.input_bad:
            between = "" if self.after is None else f", or an operation between module {self.after!r} and that one"
            return f"the batch{between}, as the input of that module was non-finite already"
        return _CAUSES[self.phase]

    def __str__(self) -> str:
        parameter = f", parameter {self.parameter!r}" if self.parameter else ""
        return f"module {self.module!r}{parameter}: {self.cause}"


def locate(root: nn.Module, run: Callable[[], Tensor | None], *, backward: bool = True) -> Origin | None:
    """Return the origin of the first non-finite value of ``run``; ``None`` if all values stay finite.

    ``run`` makes one forward pass through modules of ``root`` and one backward pass, and returns the loss. With
    ``backward=False`` it makes a forward pass without gradients. The host reads every output and gradient.
    """
    watch = _Watch(root, backward)
    with torch.compiler.set_stance("force_eager"), watch:  # a compiled module would not run the new hooks
        loss = run()
    return watch.verdict(loss)


def from_parameters(root: nn.Module) -> Origin | None:
    """Return the first module, in definition order, with a non-finite parameter of its own; ``None`` without any."""
    for name, parameter in root.named_parameters():
        if parameter.is_floating_point() and not _finite(parameter):
            return Origin(name.rpartition(".")[0], name, "forward")
    return None


def from_gradients(
    root: nn.Module, gradient_of: Callable[[Any], Tensor | None] = lambda parameter: parameter.grad
) -> Origin | None:
    """Return a guess from the gradients alone: the last parameter, in definition order, with a non-finite one.

    ``None`` if every gradient is finite.
    """
    gradients = ((name, gradient_of(parameter)) for name, parameter in root.named_parameters())
    bad = [name for name, gradient in gradients if gradient is not None and not _finite(gradient)]
    return Origin(bad[-1].rpartition(".")[0], bad[-1], "backward") if bad else None


class _Watch:
    """Hooks on every module's output, on the gradients of these outputs, and on every parameter's gradient."""

    def __init__(self, root: nn.Module, backward: bool) -> None:
        self._root, self._with_backward = root, backward
        self._names = {module: name or type(module).__name__ for name, module in root.named_modules()}
        self._handles: list[Any] = []
        self._watched: dict[int, Tensor] = {}  # keeps them alive, so that no id is used twice
        self._forward: tuple[str, nn.Module, bool, str | None] | None = None
        self._last: str | None = None
        self._last_finite: str | None = None
        self._backward: str | None = None
        self._parameter: str | None = None

    def __enter__(self) -> None:
        for module in self._names:
            if module is not self._root or len(self._names) == 1:  # the root would see all values
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
            return  # a recomputation of checkpointing, or an evaluation without gradients
        name, tensors, before = self._names[module], floating_in(output), self._last
        if next(module.children(), None) is None:
            self._last = name
        with torch.no_grad():  # else checkpointing would miss the saved tensors in its recomputation
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
            else:  # the backward of the module after this output made it: the last one with a finite gradient
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
    return bool(torch.isfinite(local(tensor)).all())  # local: one rank may call this alone


def _healthy(tensor: Tensor, module: nn.Module) -> bool:
    """Return True if the values may come from this module. Without parameters it may return ``-inf`` (a mask)."""
    if next(module.parameters(), None) is not None:
        return _finite(tensor)
    tensor = local(tensor)
    return not bool(torch.isnan(tensor).any() | torch.isposinf(tensor).any())
