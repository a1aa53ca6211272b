"""The size of a transformer, and what a token of it costs in FLOPs, by the conventions in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mp.errors import Faults, is_number

#: FLOPs of a trained token by convention, as it is printed next to an MFU. N: all parameters; E: the table of input
#: embeddings; L, h, s: layers, width, length of the sequence
CONVENTIONS = {
    "mosaicml": "6N + 12Lhs",  # llm-foundry, scripts/train/benchmarking/README.md
    "megatron": "6(N - E) + 6Lhs",  # Megatron-Bridge, docs/performance-summary.md: a causal mask halves attention
    "recompute": "8N + 16Lhs",  # Narayanan et al. 2021, equation 3: every layer's forward counted twice
}
#: trained tokens a parameter that spend a budget of FLOPs best (Hoffmann et al. 2022, "Chinchilla")
TOKENS_PER_PARAMETER = 20
#: by what name a config has the experts of a layer
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
#: head size, vocabulary and sequence of a model of which only the size is said: Llama's
_HEAD, _VOCAB, _SEQUENCE = 128, 32000, 2048
#: a size this near to a usual one is meant to be it
_USUAL_WITHIN = 0.06
#: by parameters: layers and width of the models that are usual at that size (GPT-3 table 2.1, Llama 1 to 3)
_USUAL = (
    (125e6, 12, 768),
    (350e6, 24, 1024),
    (760e6, 24, 1536),
    (1.3e9, 24, 2048),
    (2.7e9, 32, 2560),
    (7e9, 32, 4096),
    (13e9, 40, 5120),
    (33e9, 60, 6656),
    (70e9, 80, 8192),
    (175e9, 96, 12288),
    (405e9, 126, 16384),
    (1e12, 128, 25600),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a decoder-only transformer; every field a whole number, ``seq_len`` in tokens.

    What is not said is filled in: heads of 128, as many for keys and values, an MLP of four times the width, Llama 2's
    vocabulary, 2048 tokens.

    Raises:
        PlanError: a field that is no whole number of at least 1.
    """

    params: int
    layers: int
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    vocab: int = _VOCAB
    seq_len: int = _SEQUENCE

    def __post_init__(self) -> None:
        fill = object.__setattr__
        with Faults("ModelShape") as faults:
            for name in self.__slots__:
                value: object = getattr(self, name)
                value = int(value) if is_number(value) and value == int(value) else value
                fill(self, name, value)
                least = 0 if name in ("heads", "kv_heads", "intermediate") else 1
                faults.whole(name, value, least, "write a positive whole number")
            if not faults.found and self.heads and self.kv_heads and self.heads % self.kv_heads:
                given = f"kv_heads={self.kv_heads} for {self.heads} heads"
                faults.add(given, "a divisor of the heads, which share them", f"use kv_heads={self.heads}")
        fill(self, "heads", self.heads or max(1, self.hidden // _HEAD))
        fill(self, "kv_heads", self.kv_heads or self.heads)
        fill(self, "intermediate", self.intermediate or 4 * self.hidden)

    @classmethod
    def from_config(cls, config: Any, *, params: int | None = None, seq_len: int | None = None) -> ModelShape:
        """The shape that a transformers config describes (an object or a mapping); ``params`` is counted if not given.

        Raises:
            PlanError: the config says no width or number of layers, or is of another kind of model.
        """
        known: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        known = _completed(known) if isinstance(config, Mapping) and "model_type" in known else known

        def first(*names: str) -> int:
            return next((int(known[name]) for name in names if is_number(known.get(name))), 0)

        hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "n_layers")
        with Faults("ModelShape") as faults:
            if not hidden or not layers:
                given = f"a config with {', '.join(sorted(map(str, known))) or 'nothing'}"
                faults.add(given, "hidden_size and num_hidden_layers, or n_embd and n_layer", "give ModelShape(...)")
            elif other := _another_kind(known, first(*_EXPERTS)):
                faults.add(f"a config of {other}", "a dense decoder's", "give ModelShape(params, layers, hidden, ...)")
        heads = first("num_attention_heads", "n_head", "n_heads")
        kv_heads = first("num_key_value_heads", "num_kv_heads") or heads
        if known.get("multi_query") and not known.get("new_decoder_architecture"):  # Falcon, BigCode
            kv_heads = 1
        # No gate in GPT-2's family: an MLP of two matrices, four times the width.
        wide = first("intermediate_size", "n_inner") or 4 * hidden
        vocab = first("vocab_size") or _VOCAB
        # Llama's family has a gate, also where its MLP is four times as wide (Gemma)
        gate = wide != 4 * hidden or "rms_norm_eps" in known
        tied, head = bool(known.get("tie_word_embeddings")), first("head_dim")
        counted = params or _count(hidden, layers, heads, kv_heads, wide, vocab, tied=tied, gate=gate, head=head)
        length = seq_len or first("max_position_embeddings", "n_positions", "max_seq_len") or _SEQUENCE
        return cls(counted, layers, hidden, heads, kv_heads, wide, vocab, length)

    @classmethod
    def of_size(cls, params: float, *, seq_len: int | None = None, vocab: int = _VOCAB) -> ModelShape:
        """A Llama of about ``params`` parameters: the usual layers and width of that size, the MLP as wide as it takes.

        ``params`` of the result is what such a model counts, within a few per cent of what was asked for.
        """
        with Faults("ModelShape") as faults:
            if not is_number(params) or params < 1:
                faults.add(f"params={params!r}", "a number of parameters, at least 1", "write 7e9 for 7 billion")
        layers, hidden = min(_USUAL, key=lambda row: abs(math.log(row[0] / max(params, 1.0))))[1:]
        head = _HEAD if hidden % _HEAD == 0 and hidden >= 2048 else 64
        # Between the usual sizes the number of layers follows; the MLP is Llama's 8/3 of the width.
        wide = -(-8 * hidden // (3 * 256)) * 256
        block = _count(hidden, 1, hidden // head, hidden // head, wide, 0, tied=True)
        usual = _count(hidden, layers, hidden // head, hidden // head, wide, vocab, tied=False)
        if abs(usual / params - 1) > _USUAL_WITHIN:
            layers = max(1, round((params - 2 * vocab * hidden) / block))
        counted = _count(hidden, layers, hidden // head, hidden // head, wide, vocab, tied=False)
        return cls(counted, layers, hidden, hidden // head, hidden // head, wide, vocab, seq_len or _SEQUENCE)

    @property
    def tokens(self) -> int:
        """Chinchilla's budget of training tokens."""
        return TOKENS_PER_PARAMETER * self.params


def flops_per_token(shape: ModelShape, convention: str = "mosaicml") -> float:
    """FLOPs of one trained token, forward and backward, by one of ``CONVENTIONS``.

    Raises:
        PlanError: no such convention.
    """
    attention = shape.layers * shape.hidden * shape.seq_len
    if convention == "mosaicml":
        return 6.0 * shape.params + 12.0 * attention
    if convention == "megatron":
        return 6.0 * (shape.params - shape.vocab * shape.hidden) + 6.0 * attention
    with Faults("flops_per_token") as faults:
        if convention != "recompute":
            faults.unknown("convention", convention, CONVENTIONS, "write one of these")
    return 8.0 * shape.params + 16.0 * attention


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a ``config.json`` says, with its model type's defaults for the rest, where transformers knows the type."""
    given = dict(config)
    try:
        from transformers import AutoConfig

        return vars(AutoConfig.for_model(given.pop("model_type"), **given))
    except Exception:  # not installed, or another release's file: what it says has to do
        return config


def _another_kind(known: Mapping[str, Any], experts: int) -> str:
    """What a config is of that has a width and layers, and whose bytes and FLOPs are not those of a dense decoder."""
    if experts > 1:
        return f"a mixture of {experts} experts"
    if known.get("is_encoder_decoder"):
        return "an encoder and a decoder"
    return "a model of images" if "vocab_size" not in known and "image_size" in known else ""


def _count(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    *,
    tied: bool,
    gate: bool = True,
    head: int = 0,
) -> int:
    """Parameters of a decoder without biases."""
    head = head or hidden // max(heads, 1)
    attention = 2 * hidden * head * (max(heads, 1) + kv_heads)
    mlp = (3 if gate else 2) * hidden * intermediate
    return layers * (attention + mlp + 2 * hidden) + (1 if tied else 2) * vocab * hidden + hidden
