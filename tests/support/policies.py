"""Policies to draw, for properties that hold for all of them."""

from hypothesis import strategies as st

from lightning_mp import FP8, Checkpointing, NonFinite, Pin, PrecisionPolicy
from lightning_mp.policy import PRECISIONS, STORAGE_DTYPES
from lightning_mp.policy.precision_policy import TF32_SETTINGS
from support.scales import scalings

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
storage = st.sampled_from(STORAGE_DTYPES)
outputs = st.none() | st.sampled_from(["pin", "input"]) | storage
wide_pins = st.builds(Pin, pattern=words, dtype=st.sampled_from(["bf16", "fp16"]), accumulate=st.just("fp32"))
pins = st.builds(Pin, pattern=words, dtype=storage, output=outputs) | wide_pins


@st.composite
def checkpointings(draw: st.DrawFn) -> Checkpointing:
    mode = draw(st.sampled_from(["full", "selective"]))
    return Checkpointing(
        modules=draw(words | st.lists(words, min_size=1, max_size=3)),  # type: ignore[arg-type]
        mode=mode,
        every=draw(st.integers(1, 9)),
        save_ops=draw(st.none() | st.lists(words, max_size=3)) if mode == "selective" else None,  # type: ignore[arg-type]
        preserve_rng=draw(st.booleans()),
    )


@st.composite
def fp8_rules(draw: st.DrawFn) -> FP8:
    recipe = draw(st.sampled_from(["rowwise", "tensorwise", "rowwise_gw_hp", "mxfp8", "mxfp8_gw_hp"]))
    return FP8(
        recipe=recipe,
        modules=draw(words | st.lists(words, min_size=1, max_size=3)),  # type: ignore[arg-type]
        skip=draw(words | st.lists(words, max_size=3)),  # type: ignore[arg-type]
        all_gather=draw(st.booleans()) if recipe == "tensorwise" else False,
        evaluate=draw(st.sampled_from(["bf16", "fp8"])),
        emulate=draw(st.booleans()),
        small=draw(st.sampled_from(["skip", "convert"])),
    )


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    precision = draw(st.sampled_from(PRECISIONS))
    scaled = precision in ("16-mixed", "16-true", "auto")
    actions = st.sampled_from(["skip", "raise", "ignore"])
    return PrecisionPolicy(
        precision=precision,
        loss_scaling=draw(st.none() | scalings()) if scaled else None,
        pins=tuple(draw(st.lists(pins, max_size=3))),
        tf32=draw(st.none() | st.sampled_from(TF32_SETTINGS)),
        checkpointing=draw(st.none() | checkpointings()),
        fp8=draw(st.none() | fp8_rules()) if precision == "fp8-mixed" else None,
        nonfinite=NonFinite(action=draw(actions), max_consecutive=draw(st.integers(0, 200))),
        reduce_dtype=draw(storage),
        buffer_dtype=draw(st.none() | storage),
    )
