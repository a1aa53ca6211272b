"""Observation of a running model: dtypes of parameters, inputs, outputs, operators and reductions of each module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat import lightning
from lightning_mp.compat.deepspeed import partitions
from lightning_mp.compat.lightning import Trainer
from lightning_mp.compat.torch import OpOverload, TorchDispatchMode, in_backward_formula, is_compiled
from lightning_mp.compat.torchao import held_dtype
from lightning_mp.modules.patterns import original_class, plain_name
from lightning_mp.numerics.dtypes import dtype_name, floating_in, has_tf32, uncastable
from lightning_mp.plan.side_run import around_passes

Kind = Literal["product", "norm", "lookup", "statistic", "pointwise"]

_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "miopen_convolution")
_RNN = ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn")
#: aten operators that torch's autocast lists run in the lower precision on every device ("Autocast Op Reference")
_PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "_addmm_activation", "_grouped_mm", "_scaled_mm",
    "_scaled_grouped_mm", "_efficient_attention_forward", "_flash_attention_forward", *_CONVOLUTIONS, *_RNN,
))  # fmt: skip
_NORMS = frozenset(
    ["native_layer_norm", "native_group_norm", "_fused_rms_norm", "layer_norm", "group_norm", "rms_norm"]
)
_LOOKUPS = frozenset(("embedding", "embedding_bag", "_embedding_bag"))
_STATISTICS = frozenset(("mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "rsqrt", "sqrt"))
#: products that the lists name on some devices only, and elementwise operators without torch's tag
_AS_POINTWISE = frozenset(("mv", "addmv", "dot", "_trilinear", "_prelu_kernel"))
#: the last two keep a mask finite where a pin casts it
_COPIES = frozenset(("clone", "copy", "copy_", "fill", "fill_", "zero_", "clamp", "where"))
#: the namespace of a process group's collectives; tensor parallelism moves activations by ``_c10d_functional``
_COLLECTIVES = "c10d"
#: dtypes of optimizer state by ``id`` of its parameter
States = Mapping[int, set[str]]
#: the plain attention kernel alone uses it, between two products that it widens to fp32 by itself
_IN_PLAIN_ATTENTION = "_safe_softmax"
_REDUCTIONS = ("allreduce", "reduce_scatter", "reduce_")


@dataclass(frozen=True, slots=True)
class Ran:
    """One kind of operator in one combination of dtypes (short names, sorted).

    ``weighted`` is True for a norm that has weights or running statistics next to its input.
    """

    kind: Kind
    dtypes: tuple[str, ...]
    weighted: bool = False


def read(func: Any, args: tuple[Any, ...], result: Any) -> Ran | None:
    """Return the kind and dtypes of ``func(*args)``; ``None`` for copies, views, creation and integers."""
    name, weighted = func.overloadpacket.__name__, False
    if is_product(name):
        kind, seen = "product", _products(name, args)
    elif name in _NORMS or ("batch_norm" in name and "backward" not in name):
        kind, seen, weighted = "norm", dtypes(args), len(floating_in(args)) > 1
    elif name in _LOOKUPS:
        kind, seen = "lookup", dtypes(args[:1])
    elif name in _STATISTICS:
        kind, seen = "statistic", dtypes(result)
    elif name in _AS_POINTWISE or (torch.Tag.pointwise in cast("OpOverload", func).tags and name not in _COPIES):
        kind, seen = "pointwise", dtypes(result)
    else:
        return None
    return Ran(kind, tuple(sorted(seen)), weighted) if seen else None


def is_product(name: str) -> bool:
    """Return True if the aten operator multiplies matrices, attention and convolution included."""
    return name in _PRODUCTS or (name.startswith(("_scaled_dot_product", "scaled_dot")) and "backward" not in name)


def _products(name: str, args: tuple[Any, ...]) -> set[str]:
    # The two factors come first. Later arguments (a mask, a scale) do not decide the dtype of the product.
    factors = [item for item in args if isinstance(item, Tensor) and item.is_floating_point()][:2]
    held = {dtype_name(held_dtype(item)) for item in factors}
    if "fp32" not in held or not has_tf32(factors[0].device):
        return held
    cudnn: Any = torch.backends.cudnn
    kind = "conv" if name in _CONVOLUTIONS else "rnn" if name in _RNN else None
    switch: Any = getattr(cudnn, kind, cudnn) if kind else torch.backends.cuda.matmul
    return held - {"fp32"} | {"tf32"} if switch.fp32_precision == "tf32" else held


def dtypes(data: Any) -> set[str]:
    """Return the short names of the floating dtypes in nested ``data``."""
    return {dtype_name(tensor.dtype) for tensor in floating_in(data)}


@dataclass(slots=True)
class Observed:
    """The dtypes seen at one module, as short names; plain data, so that ranks can exchange it.

    Attributes:
        class_name: the name of its class.
        trained: dtypes of its own trained parameters.
        frozen: dtypes of its own frozen parameters.
        special: dtypes of its own quantized weights, which choose their storage themselves.
        ran: the operators in its own forward, its children left out.
        grad: dtypes of its gradients.
        reduce: dtypes in which its gradients were summed over ranks.
        state: dtypes of its optimizer state.
        hidden: True inside a compiled or scripted region, where no hook can be placed.
        sharded: True if each rank holds a part of its parameters.
        attends: True if it runs torch's plain attention kernel, which makes some products in fp32 by itself.
    """

    class_name: str
    trained: set[str] = field(default_factory=set[str])
    frozen: set[str] = field(default_factory=set[str])
    special: set[str] = field(default_factory=set[str])
    input: set[str] = field(default_factory=set[str])
    output: set[str] = field(default_factory=set[str])
    ran: set[Ran] = field(default_factory=set[Ran])
    grad: set[str] = field(default_factory=set[str])
    reduce: set[str] = field(default_factory=set[str])
    state: set[str] = field(default_factory=set[str])
    hidden: bool = False
    sharded: bool = False
    attends: bool = False

    @property
    def param(self) -> set[str]:
        """Return the dtypes of all its own parameters."""
        return self.trained | self.frozen | self.special

    def add(self, other: Observed) -> None:
        """Add the observations of another step, or of another rank, of the same module."""
        for name in ("trained", "frozen", "special", "input", "output", "ran", "grad", "reduce", "state"):
            getattr(self, name).update(getattr(other, name))
        for name in ("hidden", "sharded", "attends"):
            setattr(self, name, getattr(self, name) or getattr(other, name))

    def add_past(self, before: Observed, *, same: bool) -> None:
        """Add the observations of an earlier step that can only be made while a step runs.

        Without ``same``, operators, gradients and state are cleared: they ran under another declaration.
        """
        grad, state = self.grad or before.grad, self.state or before.state
        self.add(replace(before, trained=set(), frozen=set(), special=set(), grad=grad, state=state))
        for past in () if same else (self.ran, self.grad, self.state):
            past.clear()


class Watch(TorchDispatchMode):
    """Watches the modules of a model between ``start`` and ``stop``; every hook is removed by ``stop``.

    ``modules`` have the names of the report, the root ``""``. ``gradient_hooks`` observes gradients as they arrive,
    for engines that leave none in ``.grad`` (ZeRO).
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that dynamo compiles under this mode. Otherwise it would never compile those functions."""
        return True

    def __init__(self, modules: Mapping[str, nn.Module], *, gradient_hooks: bool = False) -> None:
        super().__init__()
        self._modules, self._gradient_hooks = modules, gradient_hooks
        self.seen = unseen(modules)
        #: dtypes of gradients summed across ranks, while ``in_backward``
        self.reduced: set[str] = set()
        self.in_backward = False
        self._compiled = any(seen.hidden for seen in self.seen.values())
        self._inside: list[str] = []
        self._undo = ExitStack()

    def start(self, trainer: Trainer) -> None:
        """Register the hooks, and enter this mode around the passes of ``trainer``."""
        self._undo.callback(around_passes(trainer, lambda: self))
        for name, module in self._modules.items():
            if name and not self.seen[name].hidden:
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                self._undo.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
                # always_call: torch leaves a recomputed region by an exception once it has enough
                self._undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            for parameter in module.parameters(recurse=False) if self._gradient_hooks else ():
                if parameter.requires_grad:
                    grad = self.seen[name].grad
                    hook = parameter.register_hook(lambda gradient, grad=grad: grad.add(dtype_name(gradient.dtype)))
                    self._undo.callback(hook.remove)

    def stop(self) -> None:
        """Remove every hook. Calling it twice is safe."""
        self._undo.close()
        self._inside.clear()
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):  # not a higher-order one
            if func.namespace == _COLLECTIVES:
                self._note_reduction(func.overloadpacket.__name__, args)
            elif func.namespace == "aten":
                self._note_operator(func, args, result)
        return result

    def _note_reduction(self, name: str, args: tuple[Any, ...]) -> None:
        if not self.in_backward or not name.strip("_").startswith(_REDUCTIONS):
            return
        tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
        # A single number is a flag or a count.
        self.reduced.update(dtype_name(t.dtype) for t in tensors if t.is_floating_point() and t.numel() > 1)

    def _note_operator(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        if not self._inside and in_backward_formula():  # and not in a recomputation there
            return
        name, operator = self._inside[-1] if self._inside else "", func.overloadpacket.__name__
        self.seen[name].attends |= operator == _IN_PLAIN_ATTENTION
        owns = bool(name) and any(True for _ in self._modules[name].parameters(recurse=False))
        differentiable = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        # Elsewhere only products that training depends on count, not a table of positions made in fp32. A compiled
        # region leaves its products at whatever is around it.
        if owns or (not self._compiled and is_product(operator) and differentiable):
            ran = read(func, args, result)
            self.seen[name].ran.update([ran] if ran else [])

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a function compiled by the user: leave no trace in its graph
            return
        self._inside.append(name)
        self.seen[name].input |= dtypes((args, kwargs))

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._inside.pop()
        self.seen[name].output |= dtypes(output)

    def attribute_reductions(self) -> None:
        """Set ``reduce`` of each module from the dtypes of the reduced buckets, which have no names.

        A whole gradient was reduced in its own dtype if any bucket has that dtype. Otherwise all were cast.
        """
        for seen in self.seen.values():
            if seen.trained and (seen.grad or seen.sharded):
                own = set[str]() if seen.sharded else seen.grad & self.reduced
                seen.reduce |= own or self.reduced


def note_parameters(seen: Mapping[str, Observed], modules: Mapping[str, nn.Module], states: States) -> None:
    """Add the dtypes of the modules' own parameters and of their optimizer state to ``seen``."""
    for name, module in modules.items():
        observed, quantized = seen[name], uncastable(module)
        for parameter in module.parameters(recurse=False):
            # bitsandbytes casts the frozen bias of a quantized weight itself
            special = id(parameter) in quantized or (quantized and not parameter.requires_grad)
            kind = observed.trained if parameter.requires_grad else observed.frozen
            kind = observed.special if special or not parameter.is_floating_point() else kind
            kind.add(dtype_name(parameter.dtype))
            observed.sharded |= hasattr(parameter, "to_local")
            observed.state |= states.get(id(parameter), set())


def note_gradients(seen: Mapping[str, Observed], modules: Mapping[str, nn.Module]) -> None:
    """Add the dtypes of every ``.grad`` to ``seen``."""
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                seen[name].grad.add(dtype_name(parameter.grad.dtype))


def unseen(modules: Mapping[str, nn.Module]) -> dict[str, Observed]:
    """Return an empty observation for each module, with its class, and whether a hook can be placed."""
    hidden: set[int] = set()  # in compiled and scripted regions, where a hook would be compiled along, and stay
    for module in modules[""].modules():
        wrapped = isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
        if wrapped or is_compiled(module) or lightning.is_compiled(module):
            hidden.update(map(id, module.modules()))
    return {
        name: Observed(original_class(module).__name__, hidden=id(module) in hidden) for name, module in modules.items()
    }


def modules_of(root: nn.Module) -> dict[str, nn.Module]:
    """Return every module by its plain name. A wrapper's name belongs to the inner module."""
    return {plain_name(name): module for name, module in root.named_modules()} | {"": root}


def states_of(optimizers: Iterable[Any]) -> dict[int, set[str]]:
    """Return the dtype names of each parameter's optimizer state, by ``id`` of the parameter.

    Only floating-point tensors count. ``step`` is left out, and so are scalars, unless the
    parameter itself is a scalar. A set may be empty. A parameter without state may be absent.
    """
    dtypes_of: dict[int, set[str]] = {}
    for parameter, state in (pair for optimizer in optimizers for pair in _states(optimizer)):
        held = [value for key, value in state.items() if isinstance(value, Tensor) and key != "step"]
        shaped = [value for value in held if value.is_floating_point() and (value.dim() or not parameter.dim())]
        dtypes_of.setdefault(id(parameter), set()).update(dtype_name(value.dtype) for value in shaped)
    return dtypes_of


def _states(optimizer: Any) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    parts = partitions(optimizer)
    while hasattr(optimizer, "optimizer"):  # wrappers of DeepSpeed, Apex and others hold the optimizer there
        optimizer = optimizer.optimizer
    state: Mapping[Any, Any] = optimizer.state
    if not parts:
        yield from ((parameter, values) for parameter, values in state.items() if isinstance(parameter, Tensor))
    for parameters, flat in parts:
        yield from ((parameter, state.get(flat, {})) for parameter in parameters)


def from_all_ranks(seen: dict[str, Observed]) -> list[dict[str, Observed]]:
    """Return the observations of each rank. A collective, which every rank has to call."""
    if not dist.is_available() or not dist.is_initialized():
        return [seen]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    return cast("list[dict[str, Observed]]", gathered)
