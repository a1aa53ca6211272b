"""A stage of a transformers decoder: the same class with the other stages' layers left out, under the same names."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where a decoder keeps its parts."""

    body: str
    layers: str
    #: only in the first stage, and what takes their place elsewhere
    first: tuple[str, ...]
    last: str


_LLAMA = _Shape("model", "layers", ("embed_tokens",), "norm")
#: the classes whose forward was compared, stage by stage, with the whole: others share layers, …
_SHAPES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPT2LMHeadModel": _Shape("transformer", "h", ("wte", "wpe", "drop"), "ln_f"),
}
KNOWN = tuple(_SHAPES)


class _Nothing(nn.Module):
    """In place of position embeddings after the first stage: they were added there."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class DecoderStage(nn.Module):
    """Takes token ids in the first stage and hidden states after it; gives hidden states, in the last stage logits.

    An attention mask may come with the ids: it is handed on from stage to stage.
    """

    def __init__(self, model: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._first, self._last = first, last

    def forward(self, tokens_or_hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Ids (rows, length) or hidden states (rows, length, width), and the mask (rows, length) if there is one."""
        given = {"input_ids" if self._first else "inputs_embeds": tokens_or_hidden, "attention_mask": attention_mask}
        output = self.model(**given, use_cache=False).logits
        return output if self._last or attention_mask is None else (output, attention_mask)


def decoders(module: nn.Module) -> list[nn.Module]:
    """The models below ``module`` that can be cut here."""
    return [part for part in module.modules() if _shape(part) is not None]


def _shape(module: nn.Module) -> _Shape | None:
    kind = next((kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")), None)
    return None if kind is None else _SHAPES.get(kind.__name__)


def layers_of(model: nn.Module) -> int:
    """How many layers the model has."""
    shape = cast("_Shape", _shape(model))
    return len(getattr(getattr(model, shape.body), shape.layers))


def stage(model: nn.Module, index: int, count: int) -> nn.Module:
    """Stage ``index`` of ``count``, made of ``model``'s own submodules; earlier stages get the layers left over."""
    shape = cast("_Shape", _shape(model))
    body = cast("nn.Module", getattr(model, shape.body))
    named = list(cast("nn.ModuleList", getattr(body, shape.layers)).named_children())
    size, over = divmod(len(named), count)
    begin = index * size + min(index, over)
    chosen = slice(begin, begin + size + (index < over))
    first, last = index == 0, index == count - 1
    kept: dict[str, nn.Module] = {shape.layers: _some(named[chosen])}
    if not first:
        kept |= {name: _Nothing() if name == "wpe" else nn.Identity() for name in shape.first}
    if not last:
        kept |= {shape.last: nn.Identity()}
    kinds: Any = getattr(body.config, "layer_types", None)
    # a layer's kind of attention is found by its place in the list
    own = copy(body.config)
    vars(own).update({"layer_types": kinds[chosen]} if kinds else {})
    pruned = {shape.body: _with(body, kept, own), **({} if last else {"lm_head": nn.Identity()})}
    return DecoderStage(_with(model, pruned, model.config), first=first, last=last)


def _some(named: Iterable[tuple[str, nn.Module]]) -> nn.ModuleList:
    chosen = nn.ModuleList()
    for name, layer in named:
        chosen.add_module(name, layer)
    return chosen


def _with(module: nn.Module, parts: dict[str, nn.Module], config: Any) -> nn.Module:
    """The same module, of the same class, with other submodules and config; everything else is shared."""
    changed = copy(module)
    vars(changed).update(_modules={**vars(module)["_modules"], **parts}, config=config)
    return changed
