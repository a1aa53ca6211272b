"""Short words for tests of the DeepSpeed JSON: compose it, and count its faults."""

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from lightning_mp.deepspeed.merge import add_trainer, compose
from lightning_mp.deepspeed.read import BLOCKS, REFUSED, SUBJECT
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.policy import PRECISIONS, PrecisionPolicy
from lightning_mp.policy.pieces import LossScaling

DATA = Path(__file__).parent / "data" / "deepspeed_configs.json"
REAL: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
RESOLVED = tuple(name for name in PRECISIONS if name != "auto")
OFF = {"enabled": False}
DEEPSPEED = LossScaling.deepspeed()
# LongSpec's block, sail-sg/LongSpec longspec/train/conf/exp/qwq_glide_8gpu_slim6b.yaml
WHOLE_FP16 = {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16}
WHOLE_FP16 |= {"loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1}


def policy(precision: str = "16-mixed", **fields: Any) -> PrecisionPolicy:
    return PrecisionPolicy(precision=precision, **fields)


def composed(precision: str = "16-mixed", user: Any = None, /, *, stage: int = 2, **words: Any) -> dict[str, Any]:
    """``compose`` for a precision; LossScaling.deepspeed() is the rule where there is one."""
    flags = {
        name: words.pop(name) for name in ("offload_optimizer", "offload_parameters", "fp16_supported") & words.keys()
    }
    if precision.startswith("16"):
        words.setdefault("loss_scaling", DEEPSPEED)
    with Faults(SUBJECT) as faults:
        return compose(policy(precision, **words), user, faults, stage=stage, **flags)


def nested(dotted: Mapping[Any, Any]) -> dict[str, Any]:
    """``{"fp16.enabled": True}`` → ``{"fp16": {"enabled": True}}``."""
    config: dict[str, Any] = {}
    for path, value in dotted.items():
        *above, key = path.split(".") if isinstance(path, str) else [path]
        block = config
        for name in above:
            block = block.setdefault(name, {})
        block[key] = value
    return config


def faults_of(call: Callable[[], object]) -> list[Fault]:
    with pytest.raises(PlanError) as error:
        call()
    assert str(error.value).startswith("DeepSpeed config: ")
    return list(error.value.faults)


def the_fault(call: Callable[[], object]) -> Fault:
    (fault,) = faults_of(call)
    return fault


def with_trainer(config: Mapping[str, Any], **words: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"clip_norm": None, "accumulate": 1, "world_size": 1}
    with Faults(SUBJECT) as faults:
        return add_trainer(config, faults, **(defaults | words))


def parse(config: Mapping[str, Any]) -> Any:
    """DeepSpeed's own reading of a config; without a process group it takes the world for one rank."""
    return pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig(config)


def anything() -> st.SearchStrategy[dict[str, Any]]:
    """Any JSON object at all, of keys that DeepSpeed knows and of some it does not."""
    tables = BLOCKS.values()
    names = st.sampled_from([*REFUSED, *{key for table in tables for key in table}, "", "_x", "fp61"])
    words = st.sampled_from(["auto", "fp16", "bf16", "cpu", "1", ""])
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words, st.just(10**400))
    trees = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=4), max_leaves=8
    )
    block = st.one_of(*(st.dictionaries(st.sampled_from([*table]), scalars, max_size=4) for table in tables))
    return st.dictionaries(names, st.one_of(trees, block), max_size=5)


@contextmanager
def fp16_supported() -> Generator[None, None, None]:
    """DeepSpeed believes of the CPU what it believes of CUDA."""
    from deepspeed.accelerator import get_accelerator

    kind: Any = type(get_accelerator())
    before = kind.is_fp16_supported
    kind.is_fp16_supported = lambda _: True
    try:
        yield
    finally:
        kind.is_fp16_supported = before
