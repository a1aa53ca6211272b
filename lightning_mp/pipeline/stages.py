"""Functions that cut a module into stages, and the modules that run a stage."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.units import cannot_initialise, units
from lightning_mp.plan.engine import StepEngine

#: makes a stage from the module's own submodules, given its index and the number of stages
MakeStage = Callable[[int, int], nn.Module]


@dataclass(frozen=True, slots=True)
class Cut:
    """A module's cut into stages.

    ``make(index, count)`` returns the stage at ``index`` of ``count``.
    """

    make: MakeStage
    #: the stage of each parameter and buffer, by name; names that are in no stage are absent
    homes: dict[str, int]


def _maker(module: nn.Module, count: int, faults: Faults) -> MakeStage | None:
    """Return the module's ``pipeline_stage``, or its equivalent for a transformers model in it.

    The module must contain one such model only. If there is neither, or if the model has fewer
    layers than ``count``, a fault is added and ``None`` is returned.
    """
    own: Any = getattr(module, "pipeline_stage", None)
    if own is not None:
        return cast("MakeStage", own)
    models = [(part, shape) for part in module.modules() if (shape := _shape(part)) is not None]
    if len(models) != 1:
        faults.add(
            f"{type(module).__name__} without pipeline_stage(index, count), and with {len(models)} models that are cut "
            "without it",
            fix=f"define pipeline_stage(self, index, count), or use one of {', '.join(_SHAPES)}",
        )
        return None
    model, shape = models[0]
    layers = len(getattr(getattr(model, shape.body), shape.layers))
    if count > layers:
        faults.add(
            f"{count} stages of {type(model).__name__}, which has {layers} layers",
            fix=f"use at most {layers} stages, those that one process holds counted in",
        )
        return None
    return partial(_stage, model, shape)


def cut(module: LightningModule, count: int, faults: Faults) -> Cut | None:
    """Return the cut of ``module`` into ``count`` stages.

    ``None`` is returned if no function makes its stages, or if ``faults`` has a fault already.

    Faults are added for a module that cannot be initialized, and for a tied parameter in several
    stages. Faults are also added for a trained parameter in no stage, and for a stage's parameter
    that is not the module's own. A cut may be returned even then. Every stage is made once.
    """
    cannot_initialise(module, faults)
    make = None if faults.found else _maker(module, count, faults)
    if make is None:
        return None
    held: dict[int, list[int]] = {}
    known = {id(parameter) for parameter in module.parameters()}
    for index in range(count):
        stage = make(index, count)
        if any(id(parameter) not in known for parameter in stage.parameters()):
            faults.add(
                f"pipeline_stage({index}, {count}) has a parameter which is not the module's own",
                fix="use the module's submodules, not copies or new ones, so that checkpoints keep its names",
            )
        for tensor in (*stage.parameters(), *stage.buffers()):
            held.setdefault(id(tensor), []).append(index)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        where = held.get(id(parameter), [])
        if len(where) > 1:
            faults.add(
                f"{name!r} is in the stages {' and '.join(map(str, where))}, as tied embeddings are",
                fix="untie them (transformers: tie_word_embeddings=False), or use strategy='mp_fsdp2'",
            )
        elif not where and parameter.requires_grad:
            faults.add(
                f"{name!r} is trained, and in none of the {count} stages",
                fix="put its module into the stage that uses it, or freeze it",
            )
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return Cut(make, {name: held[id(tensor)][0] for name, tensor in named if id(tensor) in held})


class Part(nn.Module):
    """A stage on this rank, with its forward in the plan's forward context.

    The backward pass runs outside of the context.
    """

    def __init__(self, stage: nn.Module, module: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.stage, self._context = stage, context
        others = set(map(id, module.modules()))
        self._own = [one for one in self.modules() if id(one) not in others]

    def forward(self, *inputs: Any) -> Any:
        """Return the stage's output for ``inputs``."""
        with self._context():
            return self.stage(*inputs)

    def train_own(self, mode: bool) -> None:
        """Set the training mode of modules of the stage that the LightningModule does not have."""
        for module in self._own:
            module.training = mode


def units_of(stage: nn.Module, engine: StepEngine, faults: Faults) -> list[nn.Module]:
    """Return the shard units of a stage, and add faults for modules that cannot be one."""
    together = engine.policy.storage_dtype
    return units(stage, None, engine.pin_map, engine.stored_dtypes(), faults, together=together)[1]


# ------------------------------------------------------------------ transformers' decoders


@dataclass(frozen=True, slots=True)
class _Shape:
    """The names of the parts of a decoder model."""

    body: str
    layers: str
    #: parts of the body that only the first stage has
    first: tuple[str, ...]
    #: the part of the body that only the last stage has
    last: str


_LLAMA = _Shape("model", "layers", ("embed_tokens",), "norm")
#: the classes that were tested in stages; others are left out because they may share layers, for
#: example
_SHAPES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPT2LMHeadModel": _Shape("transformer", "h", ("wte", "wpe", "drop"), "ln_f"),
}


class _Nothing(nn.Module):
    """A replacement for position embeddings after the first stage, which has added them already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class DecoderStage(nn.Module):
    """A stage of a decoder model.

    The first stage takes token ids, others hidden states. The last one returns logits, others
    hidden states. With an attention mask, all stages but the last return the mask, too.
    """

    def __init__(self, model: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._first, self._last = first, last

    def forward(self, tokens_or_hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Return hidden states, or logits in the last stage.

        With a mask, all stages but the last return a pair of hidden states and mask.
        ``tokens_or_hidden`` has the shape (rows, length) or (rows, length, width), the mask (rows,
        length).
        """
        given = {"input_ids" if self._first else "inputs_embeds": tokens_or_hidden, "attention_mask": attention_mask}
        output = self.model(**given, use_cache=False).logits
        return output if self._last or attention_mask is None else (output, attention_mask)


def _shape(module: nn.Module) -> _Shape | None:
    """Return the names of the model's parts, or ``None`` if its parts are not known.

    The nearest transformers class among its bases must be in ``_SHAPES``.
    """
    kind = next((kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")), None)
    return None if kind is None else _SHAPES.get(kind.__name__)


def _stage(model: nn.Module, shape: _Shape, index: int, count: int) -> nn.Module:
    """Return stage ``index`` of ``count``, made of the submodules of ``model``.

    If layers cannot be split evenly, earlier stages get one more.
    """
    body = cast("nn.Module", getattr(model, shape.body))
    named = list(cast("nn.ModuleList", getattr(body, shape.layers)).named_children())
    size, over = divmod(len(named), count)
    begin = index * size + min(index, over)
    chosen = slice(begin, begin + size + (index < over))
    first, last = index == 0, index == count - 1
    layers = nn.ModuleList()
    for name, layer in named[chosen]:
        layers.add_module(name, layer)
    kept: dict[str, nn.Module] = {shape.layers: layers}
    if not first:
        kept |= {name: _Nothing() if name == "wpe" else nn.Identity() for name in shape.first}
    if not last:
        kept |= {shape.last: nn.Identity()}
    kinds: Any = getattr(body.config, "layer_types", None)
    # A layer's kind of attention is looked up by its index in the list.
    own = copy(body.config)
    vars(own).update({"layer_types": kinds[chosen]} if kinds else {})
    pruned = {shape.body: _with(body, kept, own), **({} if last else {"lm_head": nn.Identity()})}
    return DecoderStage(_with(model, pruned, model.config), first=first, last=last)


def _with(module: nn.Module, parts: dict[str, nn.Module], config: Any) -> nn.Module:
    """Return a shallow copy of ``module`` with other submodules and config. The rest is shared."""
    changed = copy(module)
    vars(changed).update(_modules={**vars(module)["_modules"], **parts}, config=config)
    return changed
