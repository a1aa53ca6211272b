"""A choice as a file for ``lightning-mp train``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, cast

from lightning_mp.errors import Faults, in_short
from lightning_mp.planner.estimate import Estimate
from lightning_mp.planner.layout import Layout
from lightning_mp.planner.shape import ModelShape
from lightning_mp.policy import PRECISIONS

_CAUSAL_LM = "lightning_mp.demo.language_model.CausalLM"
#: of a config.json what says how it was saved
_NOT_OF_A_MODEL = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config")


def blocked(layout: Layout) -> str:
    """Why this release cannot run ``layout`` from a file, as a fix; an empty string where it can."""
    if layout.precision not in PRECISIONS:
        return f"this release has no {layout.precision}: use bf16-mixed"
    if not (files("lightning_mp.configs") / "strategy" / f"{layout.strategy}.yaml").is_file():
        return f"this release has no strategy {layout.strategy!r}: use fsdp2"
    if layout.pipeline > 1 and layout.strategy != "pipeline":
        return "no strategy of this release has tensor and pipeline parallelism at once: use fsdp2 with tensor"
    return ""


def write(shape: ModelShape, module: Any, found: Estimate, reason: str, tokens: float | None) -> str:
    """The file: groups that the package ships, and what this run sets in them.

    Raises:
        PlanError: of a module there is no file.
    """
    with Faults("advise") as faults:
        if module is not None and not isinstance(module, Mapping):
            faults.add(
                type(module).__name__, "a ModelShape or a transformers config", "write the model section yourself"
            )
    config = cast("Mapping[str, Any] | None", module)
    layout = found.layout
    lines = [
        f"# {in_short(shape.params)} parameters on {layout.gpus} x {layout.gpu.word}: {found}.",
        f"# {reason}.",
        "defaults:",
        "  - plan: auto",
        f"  - strategy: {layout.strategy}",
        *([] if config is not None else ["  - model: llama_tiny"]),
        "  - data: library_text",
        "  - trainer: gpu",
        "  - callbacks: health",
        "  - _self_",
        "plan:",
        f"  precision: {layout.precision}",
    ]
    if layout.checkpointing != "none":
        lines += [
            "  checkpointing:",
            f'    modules: "*.{_blocks(config)}.*"',
            f"    mode: {layout.checkpointing}",
        ]
    lines += _strategy(layout)
    lines += _model(shape, config)
    rows = layout.micro_batch * (layout.accumulate if layout.pipeline > 1 else 1)  # a pipeline cuts its batches itself
    lines += ["data:", f"  vocab: {shape.vocab}", f"  context: {shape.seq_len}", f"  batch_size: {rows}"]
    lines += ["trainer:", f"  devices: {min(layout.gpus, layout.gpus_per_node)}", f"  num_nodes: {layout.nodes}"]
    if layout.accumulate > 1 and layout.pipeline == 1:
        lines.append(f"  accumulate_grad_batches: {layout.accumulate}")
    if tokens is not None:
        batch = layout.data * layout.micro_batch * layout.accumulate * shape.seq_len
        lines += [f"  max_steps: {math.ceil(tokens / batch)}", "  max_epochs: -1"]
    return "\n".join(lines) + "\n"


def _blocks(config: Mapping[str, Any] | None) -> str:
    """The name of the list that holds the layers: ``layers`` in Llama, ``h`` in GPT-2."""
    in_gpt = config is not None and ("n_layer" in config or config.get("model_type") == "falcon")
    return "h" if in_gpt else "layers"


def _strategy(layout: Layout) -> list[str]:
    if layout.pipeline > 1:
        lines = [
            "strategy:",
            f"  stages: {layout.pipeline}",
            f"  microbatches: {layout.accumulate}",
            "  schedule: 1f1b",
        ]
        return [*lines, f"  data_parallel_size: {layout.data}", *(["  shard: true"] if layout.data > 1 else [])]
    return ["strategy:", f"  tensor_parallel: {layout.tensor}"] if layout.tensor > 1 else []


def _model(shape: ModelShape, config: Mapping[str, Any] | None) -> list[str]:
    """The architecture that a transformers config is of, or a Llama of that size."""
    lines = list[str]()
    if config is None:
        fields = {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
        }
    else:
        with Faults("advise") as faults:
            if not config.get("model_type"):
                faults.add("a config without model_type", "one that a model can be made from", "add model_type to it")
        fields = {key: value for key, value in config.items() if key not in _NOT_OF_A_MODEL}
        lines = [f"  _target_: {_CAUSAL_LM}", f"  architecture: {config['model_type']}"]
    values = [f"    {key}: {json.dumps(value)}" for key, value in fields.items()]
    return ["model:", *lines, "  config:", *values, "  lr: 3.0e-4"]
