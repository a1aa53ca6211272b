"""Loss-scale rules and sequences of overflows, for hypothesis."""

from hypothesis import strategies as st

from lightning_mp.policy.pieces import LossScaling

FP32_MAX = 3.4028234663852886e38
SMALLEST = 2.0**-149
#: True is an overflow; long runs of one kind, so that floors, ceilings and zero are reached
traces = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=6).map(
    lambda runs: [found for found, length in runs for _ in range(length)]
)
growths = st.one_of(st.sampled_from([2.0, 1.1, 1.5, 16.0]), st.floats(1.001, 8.0))
backoffs = st.one_of(st.sampled_from([0.5, 0.3, 0.9, 2.0**-10]), st.floats(0.01, 0.99))
scales = st.one_of(
    st.sampled_from([2.0**16, 1.0, 2.0**32, 2.0**-100, FP32_MAX, SMALLEST, 2.0**126]),
    st.floats(2.0**-10, 2.0**30, width=32),
)


@st.composite
def scalings(draw: st.DrawFn) -> LossScaling:
    """Any rule whose bounds are fp32 numbers."""
    low, init, high = sorted(draw(st.tuples(scales, scales, scales)))
    return LossScaling(
        init_scale=init,
        growth_factor=draw(growths),
        backoff_factor=draw(backoffs),
        growth_interval=draw(st.integers(1, 5)),
        growth_delay=draw(st.integers(0, 2)),
        hysteresis=draw(st.integers(1, 4)),
        consecutive_hysteresis=draw(st.booleans()),
        min_scale=draw(st.sampled_from([0.0, low])),
        max_scale=draw(st.sampled_from([None, high])),
        at_min=draw(st.sampled_from(["hold", "raise"])),
        dynamic=draw(st.sampled_from([True, True, True, False])),
    )
