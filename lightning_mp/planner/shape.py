"""The size of a transformer, its FLOPs a token by several conventions, and the layout of a run over GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_mp.errors import Faults, PlanError, is_number
from lightning_mp.planner.families import FAMILIES, MIXTURES, Family
from lightning_mp.policy import precision_word
from lightning_mp.policy.hardware import GPU, find
from lightning_mp.policy.precision_policy import precision_fix

#: FLOPs of a trained token by convention, as printed next to an MFU. N: active parameters;
#: E: parameters of the input embeddings; L, h, s: layers, width, sequence length
CONVENTIONS = {
    "mosaicml": "6N + 12Lhs",  # llm-foundry, scripts/train/benchmarking/README.md
    "megatron": "6(N - E) + 6Lhs",  # Megatron-Bridge, docs/performance-summary.md: a causal mask halves attention
    "recompute": "8N + 16Lhs",  # Narayanan et al. 2021, equation 3: every layer's forward counted twice
}
#: Llama's head size, vocabulary and sequence length: defaults if only the model's size is known
_HEAD, _VOCAB, _SEQUENCE = 128, 32000, 2048
#: parameters, layers and width of usual models (GPT-3 table 2.1, Llama 1 to 3)
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
    """The size of a decoder-only transformer. Every field except ``gated`` is a whole number.

    ``heads``, ``kv_heads``, ``intermediate`` and ``active`` are filled in if they are 0: heads of
    size 128, as many key-value heads, an MLP of four times the width, all parameters active.
    ``seq_len`` is in tokens.

    For a mixture of experts ``params`` counts all parameters, and ``active`` the parameters that
    one token uses. ``intermediate`` is then the width of all experts of a token together.
    ``gated`` is True if an MLP has a third matrix, the gate. By default it is True unless the MLP
    is four times as wide as the model.

    Raises:
        PlanError: a field is no whole number in its range, or ``active`` is above ``params``. Or
            ``heads`` and ``kv_heads`` are both given, and ``kv_heads`` does not divide ``heads``.
    """

    params: int
    layers: int
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    vocab: int = _VOCAB
    seq_len: int = _SEQUENCE
    active: int = 0
    gated: bool | None = None

    def __post_init__(self) -> None:
        fill = object.__setattr__
        with Faults("ModelShape") as faults:
            for name in (item.name for item in fields(self) if item.name != "gated"):
                value: object = getattr(self, name)
                value = int(value) if is_number(value) and value == int(value) else value
                fill(self, name, value)
                least = 0 if name in ("heads", "kv_heads", "intermediate", "active") else 1
                faults.whole(name, value, least, "write a positive whole number")
            if not faults.found and self.heads and self.kv_heads and self.heads % self.kv_heads:
                given = f"kv_heads={self.kv_heads} for {self.heads} heads"
                faults.add(given, allowed="a divisor of the heads, which share them", fix=f"use kv_heads={self.heads}")
            if not faults.found and self.active > self.params:
                faults.add(f"active={self.active} of params={self.params}", fix="leave it out: all are active")
        fill(self, "active", self.active or self.params)
        fill(self, "heads", self.heads or max(1, self.hidden // _HEAD))
        fill(self, "kv_heads", self.kv_heads or self.heads)
        fill(self, "intermediate", self.intermediate or 4 * self.hidden)
        fill(self, "gated", self.intermediate != 4 * self.hidden if self.gated is None else bool(self.gated))

    @classmethod
    def from_config(cls, config: Any, *, params: int | None = None, seq_len: int | None = None) -> ModelShape:
        """Return the shape of a transformers config, an object or a mapping.

        Without ``params`` the matrices and norms are counted. A config without ``model_type`` is
        counted like Llama, with learned positions left out. Without ``seq_len`` the longest
        sequence of the config is used.

        Raises:
            PlanError: the config has no width or number of layers, its ``model_type`` is not
                counted, or its numbers make no valid shape.
        """
        known: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        kind = known.get("model_type") or getattr(config, "model_type", "")
        known = _completed(known) if isinstance(config, Mapping) and "model_type" in known else known

        def first(*names: str) -> int:
            return next((int(known[name]) for name in names if is_number(known.get(name))), 0)

        hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "n_layers")
        experts = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if said := _uncounted(kind, known, hidden, layers, experts):
            raise PlanError.of(said, "give ModelShape(params, layers, hidden, active=..., ...)", "ModelShape")
        heads = first("num_attention_heads", "n_head", "n_heads")
        kv_heads = first("num_key_value_heads", "num_kv_heads") or heads
        if known.get("multi_query") and not known.get("new_decoder_architecture"):  # Falcon, BigCode
            kv_heads = 1
        wide = first("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        # GPT-NeoX Japanese's config has a multiple of the width
        wide = wide or (first("intermediate_multiple_size") or 4) * hidden
        vocab = first("vocab_size") or _VOCAB
        tied, head = bool(known.get("tie_word_embeddings")), first("head_dim")
        longest = first("max_position_embeddings", "n_positions", "max_seq_len")
        length = seq_len or longest or _SEQUENCE
        if experts > 1:
            return _mixture(known, experts, params, cls(1, layers, hidden, heads, kv_heads, wide, vocab, length))
        # the config may be a user's own; an MLP of four times the width, like GPT-2's, has no gate
        family = FAMILIES.get(kind) or Family(gated=wide != 4 * hidden or "rms_norm_eps" in known)
        counted = _count(hidden, layers, heads, kv_heads, wide, vocab, tied=tied, gate=family.gated, head=head)
        if family.positions:
            counted += (longest + family.extra_positions) * hidden
        if family.masked_head:
            counted += (hidden + first("type_vocab_size")) * hidden
        sizes = layers, hidden, heads, kv_heads, wide, vocab, length
        return cls(params or counted, *sizes, gated=family.gated)

    @classmethod
    def of_size(cls, params: float, *, seq_len: int | None = None) -> ModelShape:
        """Return the shape of a Llama of about ``params`` parameters.

        Width and layers are the usual ones of that size, and between the usual sizes the number of
        layers follows. From 60 million on, the result's ``params`` is within a few per cent of the
        argument. A smaller model comes out larger, because its two embedding tables are fixed.

        Raises:
            PlanError: ``params`` is no number of at least 1.
        """
        if not is_number(params) or params < 1:
            raise PlanError.of(f"params={params!r} is no number of parameters", "write 7e9 for 7 billion", "ModelShape")
        layers, hidden = min(_USUAL, key=lambda row: abs(math.log(row[0] / max(params, 1.0))))[1:]
        head = _HEAD if hidden % _HEAD == 0 and hidden >= 2048 else 64
        # Llama's MLP: 8/3 of the width, rounded up to a multiple of 256
        wide = -(-8 * hidden // (3 * 256)) * 256
        block = _count(hidden, 1, hidden // head, hidden // head, wide, 0, tied=True)
        usual = _count(hidden, layers, hidden // head, hidden // head, wide, _VOCAB, tied=False)
        if abs(usual / params - 1) > 0.06:  # within 6 % of a usual size, that size is meant
            layers = max(1, round((params - 2 * _VOCAB * hidden) / block))
        counted = _count(hidden, layers, hidden // head, hidden // head, wide, _VOCAB, tied=False)
        sizes = layers, hidden, hidden // head, hidden // head, wide, _VOCAB, seq_len or _SEQUENCE
        return cls(counted, *sizes, gated=True)

    @property
    def tokens(self) -> int:
        """Chinchilla's budget of training tokens: 20 a parameter (Hoffmann et al. 2022)."""
        return 20 * self.params


def flops_per_token(shape: ModelShape, convention: str = "mosaicml") -> float:
    """Return the FLOPs of one trained token, forward and backward, by one of ``CONVENTIONS``.

    Raises:
        PlanError: ``convention`` is not one of them.
    """
    attention = shape.layers * shape.hidden * shape.seq_len
    if convention == "mosaicml":
        return 6.0 * shape.active + 12.0 * attention
    if convention == "megatron":
        return 6.0 * (shape.active - shape.vocab * shape.hidden) + 6.0 * attention
    with Faults("flops_per_token") as faults:
        if convention != "recompute":
            faults.unknown("convention", convention, CONVENTIONS, "write one of these")
    return 8.0 * shape.active + 16.0 * attention


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``config.json`` with its model type's defaults for missing keys.

    If transformers is not installed or does not know the type, return ``config`` unchanged.
    """
    given = dict(config)
    try:
        from transformers import AutoConfig

        return vars(AutoConfig.for_model(given.pop("model_type"), **given))
    except Exception:  # transformers is not installed, or the file is of another release
        return config


def _uncounted(kind: str, known: Mapping[str, Any], hidden: int, layers: int, experts: int) -> str:
    """Return why a config cannot be counted, or an empty string.

    ``known`` are its fields, ``kind`` is its model type. ``hidden``, ``layers`` and ``experts`` are
    0 if the config has no such field.
    """
    if not hidden or not layers:
        return f"a config with {', '.join(sorted(map(str, known))) or 'nothing'} says no width and number of layers"
    if (embedded := known.get("word_embed_proj_dim") or hidden) != hidden:  # OPT 350M
        return f"word_embed_proj_dim={embedded} for a width of {hidden} adds matrices that are not counted"
    counted = kind in MIXTURES if experts > 1 else not kind or kind in FAMILIES
    cross = known.get("is_encoder_decoder") or known.get("add_cross_attention")
    images = "vocab_size" not in known and "image_size" in known
    if counted and not cross and not images:
        return ""
    listed = ", ".join(MIXTURES)
    return f"model_type={kind!r} is no dense decoder that is counted, and no mixture that is counted ({listed})"


def _mixture(known: Mapping[str, Any], experts: int, params: int | None, dense: ModelShape) -> ModelShape:
    """Return ``dense`` with experts in its sparse layers. ``dense.intermediate`` is the MLP of the dense layers.

    The count follows transformers' ``modeling_*.py``: a router has one row for each expert, and
    DeepSeek's attention is of low rank. Biases, and norms within heads, are left out.
    """
    layers, hidden, heads = dense.layers, dense.hidden, dense.heads
    every, plain = known.get("decoder_sparse_step") or 1, known.get("mlp_only_layers") or ()
    first = known.get("first_k_dense_replace") or 0
    sparse = sum(index >= first and (index + 1) % every == 0 and index not in plain for index in range(layers))
    each = known.get("moe_intermediate_size") or dense.intermediate
    always = (layers - sparse) * dense.intermediate + sparse * each * (known.get("n_shared_experts") or 0)
    all_experts, used = (sparse * each * count for count in (experts, known.get("num_experts_per_tok") or experts))
    attention = 0
    if rank := known.get("kv_lora_rank"):
        plain_head, turned, value = (known[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        low, queries = known.get("q_lora_rank"), heads * (plain_head + turned)
        attention = low * (hidden + queries) + low if low else hidden * queries
        attention += hidden * (rank + turned) + rank + rank * heads * (plain_head + value) + heads * value * hidden
    tied, head = bool(known.get("tie_word_embeddings")), known.get("head_dim") or 0
    given = hidden, layers, heads, dense.kv_heads, 0, dense.vocab
    counted = _count(*given, tied=tied, head=head, attention=attention) + sparse * hidden * experts
    total = params or counted + 3 * hidden * (always + all_experts)
    active = total - 3 * hidden * (all_experts - used)
    wide = round((always + used) / layers)
    return replace(dense, params=total, active=active, intermediate=wide, gated=True)


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
    attention: int = 0,
) -> int:
    """Return the number of parameters of a decoder, without biases.

    ``attention`` is the number of one layer's attention parameters. If it is 0, it follows from the
    heads. ``head`` is a head's size, and ``tied`` is True if both embedding tables are one.
    """
    head = head or hidden // max(heads, 1)
    attention = attention or 2 * hidden * head * (max(heads, 1) + kv_heads)
    mlp = (3 if gate else 2) * hidden * intermediate
    return layers * (attention + mlp + 2 * hidden) + (1 if tied else 2) * vocab * hidden + hidden


# ---------------------------------------------------------------------- layout over GPUs


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "fp8-mixed", "bf16-true", "16-true")
CHECKPOINTING = ("none", "selective", "full")
NVLINK = ("full", "pairs", "none")
#: default Gbit/s between nodes by GPU: the network of a DGX, and of the clouds' equivalents
_GBPS = {"a100": 1600.0, "h100": 3200.0, "h200": 3200.0, "b200": 3200.0, "gb200": 3200.0, "gh200": 400.0}
_ETHERNET = 100.0
_COUNTS = {"gpus", "tensor", "pipeline", "context", "micro_batch", "gpus_per_node", "data", "accumulate"}


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of a run over ``data * tensor * pipeline * context`` GPUs.

    ``accumulate`` is the number of micro-batches in an optimizer step, ``micro_batch`` the number
    of sequences in a micro-batch.
    """

    gpu: GPU
    gpus: int
    strategy: str
    precision: str
    micro_batch: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    checkpointing: str = "none"
    accumulate: int = 1
    nvlink: str = "full"
    interconnect_gbps: float = _ETHERNET
    gpus_per_node: int = 8

    @property
    def nodes(self) -> int:
        """The number of nodes, rounded up."""
        return -(-self.gpus // self.gpus_per_node)

    def link(self, ranks: int) -> float:
        """Return bytes/s in one direction between ``ranks`` neighbouring GPUs of a node, by NVLink or PCIe."""
        wired = self.nvlink == "full" or (self.nvlink == "pairs" and ranks <= 2)
        return (wired and self.gpu.nvlink) or self.gpu.pcie

    def data_link(self) -> float:
        """Return a rank's bytes/s in a collective over all data-parallel ranks.

        Between nodes, a ring passes each byte through a node once. So a rank sees the bandwidth of
        the whole node, although the node's ranks share its network cards.
        """
        inside = self.link(min(self.gpus, self.gpus_per_node))
        return inside if self.nodes == 1 else min(inside, self.interconnect_gbps * 1e9 / 8)


def default_gbps(gpu: GPU) -> float:
    """Return the default Gbit/s between nodes with this GPU."""
    return _GBPS.get(gpu.word.partition("-")[0], _ETHERNET)


def checked(
    shape: ModelShape,
    faults: Faults,
    strategies: Iterable[str],
    *,
    gpu: str,
    precision: str,
    strategy: str = "fsdp2",
    interconnect_gbps: float | None = None,
    **words: Any,
) -> Layout | None:
    """Return the checked layout, or ``None`` after adding a fault for each wrong word.

    Faults of the degrees are added too, but then the layout is returned. ``words`` are further
    fields of :class:`Layout`. Among them ``gpus`` is required. If ``data`` or ``accumulate``
    is missing or ``None``, it follows from the others. ``strategies`` are the allowed names.
    """
    card, mode = find(gpu, faults), precision_word(precision)
    if mode not in PRECISIONS:
        faults.add(f"unknown precision {precision!r}", allowed=", ".join(PRECISIONS), fix=precision_fix(precision))
    elif card is not None and card.peak(mode) is None:
        nearest = "bf16-mixed" if card.peak("bf16-mixed") else "16-mixed"
        faults.add(f"{card.word} has no units for precision={mode!r}", fix=f"use {nearest!r}")
    strategy = str(strategy).removeprefix("mp_")
    if strategy not in strategies:
        faults.unknown("strategy", strategy, strategies, "write one of these")
    faults.one_of("checkpointing", words.get("checkpointing", "none"), CHECKPOINTING, "write 'none' to keep all")
    faults.one_of("nvlink", words.get("nvlink", "full"), NVLINK, "write 'none' for GPUs on PCIe")
    said: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    for name in said.keys() & _COUNTS:
        faults.whole(name, said[name], 1, "write a positive whole number")
    if interconnect_gbps is not None and not (is_number(interconnect_gbps) and interconnect_gbps > 0):
        faults.add(f"interconnect_gbps={interconnect_gbps!r}", allowed="Gbit/s of a node, above 0", fix="write 400")
    if faults.found or card is None or mode is None:
        return None
    stages, split = said.get("pipeline", 1), said.get("tensor", 1) * said.get("context", 1)
    said = {"data": said["gpus"] // (stages * split), "accumulate": 4 * stages if stages > 1 else 1, **said}
    gbps = interconnect_gbps or default_gbps(card)
    layout = Layout(card, strategy=strategy, precision=mode, interconnect_gbps=gbps, **said)
    _check_degrees(layout, shape, faults)
    return layout


def _check_degrees(layout: Layout, shape: ModelShape, faults: Faults) -> None:
    """Add a fault for each parallel degree that does not fit the GPUs or ``shape``."""
    degrees = {name: getattr(layout, name) for name in ("data", "tensor", "pipeline", "context")}
    product = math.prod(degrees.values())
    if product != layout.gpus:
        said = " x ".join(f"{name}={degree}" for name, degree in degrees.items()) + f" on {layout.gpus} GPUs"
        faults.add(said, allowed="degrees whose product is the GPUs", fix=f"use {product} GPUs")
    if layout.tensor > layout.gpus_per_node:
        fix = "keep it within a node, and use pipeline for the rest"
        faults.add(f"tensor={layout.tensor} goes beyond a node", fix=fix)
    elif shape.heads % layout.tensor or shape.hidden % layout.tensor:
        faults.add(f"tensor={layout.tensor} for {shape.heads} heads", fix="use a divisor of the heads")
    if layout.pipeline > shape.layers:
        faults.add(f"pipeline={layout.pipeline} for {shape.layers} layers", fix="use fewer stages")
    if shape.seq_len % layout.context:
        faults.add(f"context={layout.context} for seq_len={shape.seq_len}", fix="use a divisor")
