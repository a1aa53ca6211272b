"""``advise``: precision, strategy, degrees, checkpointing and micro-batch, best first, and why others lost."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lightning_mp.errors import Faults, PlanError, in_short, is_number
from lightning_mp.planner.estimate import Estimate, bubble, of_layout
from lightning_mp.planner.memory import STRATEGIES
from lightning_mp.planner.shape import CHECKPOINTING, Layout, ModelShape, checked
from lightning_mp.policy import hardware
from lightning_mp.policy.hardware import GPU, GPUS

_GIB = 2**30
_LARGEST_MICRO_BATCH = 64
_DEGREES = tuple(2**power for power in range(13))
#: A layout with more kinds of parallelism has to be faster by more than this factor.
_MARGIN = 1.03
RANKED = f"Ranked by speed; of layouts within {_MARGIN - 1:.0%} the one with fewer kinds of parallelism comes first."
_CAUSAL_LM = "lightning_mp.demo.language_model.CausalLM"
#: keys of a config.json that describe the file, not the model
_NOT_OF_A_MODEL = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config")


@dataclass(frozen=True)
class Advice:
    """The layouts that fit (``choices``), best first, and a line for each of the others (``lost``).

    If nothing fits, ``missing_bytes`` are the missing bytes on each GPU, and ``nearest_gpus`` a number of GPUs that is
    enough.
    """

    shape: ModelShape
    module: Any
    gpu: GPU
    choices: tuple[Estimate, ...]
    lost: tuple[str, ...]
    precision_reason: str
    #: the tokens to train on; ``None``: 20 a parameter
    tokens: float | None
    missing_bytes: int = 0
    nearest_gpus: int | None = None

    @cached_property
    def best(self) -> Estimate:
        """Return the first choice.

        Raises:
            PlanError: nothing fits.
        """
        if not self.choices:
            missing = f"{self.missing_bytes / _GIB:,.1f} GiB too many on each {self.gpu.word}"
            fix = f"use {self.nearest_gpus} GPUs" if self.nearest_gpus else "use a larger GPU, or offload=True"
            raise PlanError.of(f"{in_short(self.shape.params)} parameters do not fit: {missing}", fix, "advise")
        return self.choices[0]

    def yaml(self, choice: Estimate | None = None) -> str:
        """Return a training file for ``lightning-mp train``. For a bare size its model is a Llama of that size.

        Raises:
            PlanError: nothing fits, or the advice is for a module without a transformers ``model_type``.
        """
        import yaml

        choice, module = choice or self.best, self.module
        shape, layout, staged = choice.shape, choice.layout, choice.layout.pipeline > 1
        if module is not None and not (isinstance(module, Mapping) and module.get("model_type")):
            said = "there is a file for a ModelShape or a transformers config with model_type alone"
            raise PlanError.of(said, "write the model section yourself", "advise")
        groups = {"plan": "auto", "strategy": layout.strategy, **({} if module else {"model": "llama_tiny"})}
        groups |= {"data": "library_text", "trainer": "gpu", "callbacks": "health"}
        config: dict[str, Any] = {"defaults": [*({group: name} for group, name in groups.items()), "_self_"]}
        config["plan"] = plan = dict[str, Any](precision=layout.precision)
        if layout.checkpointing != "none":
            in_gpt = module is not None and ("n_layer" in module or module["model_type"] == "falcon")
            modules = "*.h.*" if in_gpt else "*.layers.*"  # the list that holds the layers
            plan["checkpointing"] = {"modules": modules, "mode": layout.checkpointing}
        if staged:
            stages = {"stages": layout.pipeline, "microbatches": layout.accumulate, "schedule": "1f1b"}
            shard = {"shard": True} if layout.data > 1 else {}
            config["strategy"] = {**stages, "data_parallel_size": layout.data, **shard}
        elif layout.tensor > 1:
            config["strategy"] = {"tensor_parallel": layout.tensor}
        if module is None:
            width = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
            heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
            model: dict[str, Any] = {"config": {**width, "num_hidden_layers": shape.layers, **heads}}
        else:
            kept = {key: value for key, value in module.items() if key not in _NOT_OF_A_MODEL}
            model = {"_target_": _CAUSAL_LM, "architecture": module["model_type"], "config": kept}
        config["model"] = {**model, "lr": 3e-4}
        rows = layout.micro_batch * (layout.accumulate if staged else 1)  # a pipeline cuts its batches itself
        config["data"] = {"vocab": shape.vocab, "context": shape.seq_len, "batch_size": rows}
        config["trainer"] = {"devices": min(layout.gpus, layout.gpus_per_node), "num_nodes": layout.nodes}
        config["seed"] = 0
        if layout.accumulate > 1 and not staged:
            config["trainer"]["accumulate_grad_batches"] = layout.accumulate
        if self.tokens is not None:
            batch = layout.data * layout.micro_batch * layout.accumulate * shape.seq_len
            config["trainer"] |= {"max_steps": math.ceil(self.tokens / batch), "max_epochs": -1}
        head = f"# {in_short(shape.params)} parameters on {layout.gpus} x {layout.gpu.word}: {choice}."
        return f"{head}\n# {choice.reason}.\n" + yaml.safe_dump(config, sort_keys=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "shape": asdict(self.shape),
            "gpu": self.gpu.word,
            "choices": [choice.to_dict() for choice in self.choices],
            "lost": list(self.lost),
            "tokens": self.tokens or self.shape.tokens,
            "precision_reason": self.precision_reason,
            "missing_bytes": self.missing_bytes,
            "nearest_gpus": self.nearest_gpus,
        }


def advise(  # noqa: PLR0913  what there is to say of a run, by name
    shape_or_module: Any,
    *,
    gpu: str,
    gpus: int,
    nvlink: str = "full",
    interconnect_gbps: float | None = None,
    gpus_per_node: int = 8,
    seq_len: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    tokens: float | None = None,
    precision: str = "auto",
    offload: bool = False,
) -> Advice:
    """Return layouts for ``gpus`` GPUs: the precision by the rules of ``policy.hardware``, then the fastest that fits.

    Args:
        shape_or_module: a :class:`ModelShape`, or a transformers config as a mapping, or a module that has one.
        gpu: a word of ``lightning_mp.policy.hardware``.
        gpus: the number of GPUs.
        nvlink: ``"full"`` between all GPUs of a node, ``"pairs"``, or ``"none"``.
        interconnect_gbps: Gbit/s of a node to the others; by default the usual value for such nodes.
        gpus_per_node: the number of GPUs of a node, the largest degree of tensor parallelism.
        seq_len: tokens of a sequence; by default the shape's.
        global_batch: sequences an optimizer step, over all GPUs; by default the result of the layout.
        micro_batch: sequences a micro-batch for each data-parallel rank; by default the largest power of two that fits.
        tokens: the tokens to train on; by default 20 a parameter.
        precision: a mode. ``auto`` follows the rules and never chooses FP8.
        offload: also consider optimizer state and weights on the CPU.

    Raises:
        PlanError: an unknown GPU or word, a batch that no layout divides; all at once.
    """
    shape, module = _shape_of(shape_or_module, seq_len)
    faults, mode, why = Faults("advise"), precision, f"precision={precision!r} was asked for"
    if precision == "auto":
        known = GPUS.get(str(gpu).lower(), GPUS["h100-80"])  # an unknown one is noted below
        chosen = hardware.choose(known.device, shape.params)
        mode, why = chosen.precision, chosen.reason
    for name, value in {"global_batch": global_batch, "micro_batch": micro_batch}.items():
        if value is not None:
            faults.whole(name, value, 1, "write a positive whole number")
    if tokens is not None and not (is_number(tokens) and tokens > 0):
        faults.add(f"tokens={tokens!r}", allowed="a number above 0", fix="write 1e9")
    words: dict[str, Any] = {"gpu": gpu, "gpus": gpus, "precision": mode, "interconnect_gbps": interconnect_gbps}
    words |= {"nvlink": nvlink, "gpus_per_node": gpus_per_node}
    base = faults.unwrap(checked(shape, faults, STRATEGIES, **words))
    layouts = _layouts(shape, base, global_batch, offload)
    tried = [_best_of(shape, layout, global_batch, micro_batch) for layout in layouts]
    kept = [each for each in tried if each is not None]
    if not kept:
        fix = "write a multiple of the micro-batch times the data-parallel ranks"
        raise PlanError.of(f"no split of {gpus} GPUs divides global_batch={global_batch}", fix, "advise")
    fitting = sorted((each for each in kept if each.fits), key=_rank)
    choices = tuple(replace(each, reason=_reason(each, why)) for each in fitting)
    missing = 0 if choices else min(each.missing_bytes for each in kept)
    nearest = None if choices else _nearest(shape, base, offload)
    return Advice(shape, module, base.gpu, choices, _lost(kept, fitting), why, tokens, missing, nearest)


def _shape_of(given: Any, seq_len: int | None) -> tuple[ModelShape, Any]:
    if isinstance(given, ModelShape):
        return (given if seq_len is None else replace(given, seq_len=seq_len)), None
    if isinstance(given, Mapping):
        return ModelShape.from_config(given, seq_len=seq_len), given
    config = getattr(given, "config", getattr(getattr(given, "model", None), "config", None))
    if config is None or not hasattr(given, "parameters"):
        said = f"a {type(given).__name__} is neither a ModelShape, nor a transformers config as a mapping, nor has one"
        raise PlanError.of(said, "give ModelShape(params, layers, hidden, ...)", "advise")
    params = sum(parameter.numel() for parameter in given.parameters())
    return ModelShape.from_config(config, params=params, seq_len=seq_len), given


def _layouts(shape: ModelShape, base: Layout, global_batch: int | None, offload: bool) -> Iterator[Layout]:
    """Yield every split of the GPUs, without micro-batch and checkpointing."""
    degrees = [d for d in (*_DEGREES, base.gpus) if base.gpus % d == 0]
    for tensor, pipeline in itertools.product(dict.fromkeys(degrees), repeat=2):
        if tensor > base.gpus_per_node or shape.heads % tensor or shape.kv_heads % tensor or pipeline > shape.layers:
            continue
        if (base.nvlink == "pairs" and tensor > 2) or (tensor > 1 and pipeline > 1):  # no strategy has both
            continue
        data, rest = divmod(base.gpus, tensor * pipeline)
        if rest or (global_batch is not None and global_batch % data):
            continue
        accumulate = 4 * pipeline if pipeline > 1 else 1
        for strategy in _strategies(base, data, tensor, pipeline, offload):
            split = {"data": data, "tensor": tensor, "pipeline": pipeline}
            yield replace(base, strategy=strategy, accumulate=accumulate, **split)


def _strategies(base: Layout, data: int, tensor: int, pipeline: int, offload: bool) -> Iterator[str]:
    if pipeline > 1:
        yield "pipeline"
        return
    if tensor == 1:
        yield "ddp" if data > 1 else "auto"
    if base.gpus > 1:
        yield "fsdp2"
    if base.nodes > 1 and tensor == 1:
        yield "hsdp"
    if offload and tensor == 1:
        yield "fsdp2_offload"


def _best_of(shape: ModelShape, layout: Layout, global_batch: int | None, micro_batch: int | None) -> Estimate | None:
    """Return the fastest estimate that fits, over checkpointing and micro-batches.

    The smallest one if none fits; ``None`` if no micro-batch divides the global batch.
    """
    found: list[Estimate] = []
    sizes = [micro_batch] if micro_batch else [size for size in _DEGREES if size <= _LARGEST_MICRO_BATCH]
    for size, kind in itertools.product(sizes, CHECKPOINTING):
        accumulate, rest = divmod(global_batch or layout.accumulate, layout.data * size if global_batch else 1)
        if not rest:
            found.append(of_layout(shape, replace(layout, micro_batch=size, checkpointing=kind, accumulate=accumulate)))
    fitting = [each for each in found if each.fits]
    return min(fitting, key=_rank) if fitting else min(found, key=lambda each: each.memory_bytes, default=None)


def _rank(each: Estimate) -> tuple[float, ...]:
    """Return the sort key: speed in steps of the margin, then fewer parts, then the larger micro-batch."""
    layout = each.layout
    steps = round(math.log(each.tokens_per_s.mid, _MARGIN))
    parts = (layout.tensor > 1) + 2 * (layout.pipeline > 1) + (layout.strategy not in ("auto", "ddp"))
    kind = CHECKPOINTING.index(layout.checkpointing)
    return -steps, parts, kind, -layout.micro_batch, -each.tokens_per_s.mid


def _label(layout: Layout) -> str:
    others = [f"{name}={degree}" for name in ("tensor", "pipeline") if (degree := getattr(layout, name)) > 1]
    return f"{layout.strategy} ({' x '.join([f'data={layout.data}', *others])})"


def _reason(each: Estimate, why: str) -> str:
    layout, parts = each.layout, [why]
    if layout.checkpointing != "none":
        without = of_layout(each.shape, replace(layout, checkpointing="none"))
        saved = (without.memory_bytes - each.memory_bytes) / _GIB
        parts.append(f"{layout.checkpointing} checkpointing saves {saved:.1f} GiB")
    if layout.pipeline > 1:
        parts.append(f"{bubble(layout.pipeline, layout.accumulate):.0%} of a step is bubble")
    if not each.measured:
        parts.append("no published run on this GPU in this mode: a wider range")
    return "; ".join(parts)


def _lost(kept: Iterable[Estimate], fitting: list[Estimate]) -> tuple[str, ...]:
    lines = [
        f"{_label(each.layout)} does not fit: {each.missing_bytes / _GIB:,.1f} GiB missing at its smallest"
        for each in kept
        if not each.fits
    ]
    for each in fitting[1:]:
        slower = 1 - each.tokens_per_s.mid / fitting[0].tokens_per_s.mid
        speed = f"{slower:.0%} slower" if slower > 0 else f"{-slower:.0%} faster, with more parts or a smaller batch"
        lines.append(f"{_label(each.layout)}: {speed}")
    return tuple(lines)


def _nearest(shape: ModelShape, base: Layout, offload: bool) -> int | None:
    """Return a number of GPUs that is enough: the first of twice, four times, … as many; ``None`` if none is."""
    for gpus in (base.gpus * 2**power for power in range(1, 14)):
        layouts = _layouts(shape, replace(base, gpus=gpus), None, offload)
        if any(each is not None and each.fits for each in (_best_of(shape, layout, None, 1) for layout in layouts)):
            return gpus
    return None
