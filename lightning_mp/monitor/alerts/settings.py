"""Every threshold of every rule, with where its number comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from lightning_mp.errors import Faults, is_number
from lightning_mp.monitor.events import KINDS, Kind

#: the kinds that rules report; non-finite values are detected by the callbacks
RULE_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if not kind.startswith("nonfinite"))

#: with fewer numbers a median, spread or trend means nothing
SMALLEST_WINDOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """When each rule fires. Windows and counts are in readings: with one every n steps they last n times as long.

    "Measured" below: runs of 2,000 steps of small GPT-2 and MLP models in fp32, 16-mixed and bf16-mixed, several seeds,
    batches of 4 to 32.

    Raises:
        PlanError: a value out of its range, or a kind that no rule makes; every one is named.
    """

    #: the rules that run; leave a kind out to silence it
    kinds: tuple[Kind, ...] = RULE_KINDS

    #: a gradient norm is compared with the median of this many earlier ones, as soon as there are as many
    spike_window: int = 50
    #: times the median. Measured: healthy norms stay below 7 until a model is done, a bad batch is at 115 and more
    spike_ratio: float = 10.0
    #: standard deviations above the median, estimated from the median absolute deviation. Measured: healthy up to 34
    spike_sigmas: float = 30.0
    #: of the median of the first window; a norm below it does no harm. Measured: models that have memorised their data,
    #: at a hundredth of their first norms, go up 39-fold and come back ...
    spike_level: float = 0.25
    #: ... unless it is this many times the median
    spike_far: float = 100.0

    #: losses whose median is the level reached; there is none before as many were seen
    divergence_window: int = 50
    #: readings in a row that have to be too high: a single one is a bad batch
    divergence_patience: int = 3
    #: too high is each that loses this part of all progress, from the first losses to the lowest level. Measured:
    #: healthy up to 0.42, at a learning rate 30 times as high 0.57 and more ...
    divergence_progress: float = 0.5
    #: ... where on average they are this many standard deviations above that level, and each half as many
    divergence_sigmas: float = 6.0

    #: losses among which there is no fall
    plateau_window: int = 200
    #: a fall counts when it is more than this many standard errors
    plateau_sigmas: float = 3.0
    #: the gradient norm is falling when the later half's median is below this part of the earlier half's
    plateau_falling: float = 0.9
    #: share of the largest update ratio so far; below it weights no longer move, and a plateau is not convergence
    plateau_still: float = 1e-3
    #: share of the first losses; a level that lies less than this below them means that nothing was learned
    plateau_progress: float = 0.02

    #: skips in a row; warm-up under a scale of 65,536 was measured to have up to 5
    streak_skips: int = 6

    #: skips while the scale is at its floor, of the last 10 readings
    collapse_skips: int = 3

    #: a change of the scale by this factor beyond one halving or doubling a step, which is what rules do
    jump_factor: float = 8.0
    #: a change by this factor within ``jump_steps``, however many steps it took: more than 5 halvings
    jump_total: float = 64.0
    jump_steps: int = 20
    #: an FP8 operand's scale jumps by ``jump_total`` against the median of its last ``jump_steps`` readings, if that
    #: is as many standard deviations of its logarithm. Measured: healthy gradients' move by up to 30-fold in a reading
    jump_sigmas: float = 6.0

    #: share of an FP8 operand's values flushed to zero. Measured: healthy up to 0.002, with an outlier of 1e4 0.4 ...
    underflow_share: float = 0.25
    #: ... in so many readings in a row
    underflow_patience: int = 10

    #: readings whose median share of lost updates ...
    lost_window: int = 20
    #: ... is this much
    lost_share: float = 0.5

    #: readings left out at the start: compilation, caches
    throughput_warmup: int = 20
    throughput_window: int = 100
    #: share of the best level, for ``throughput_patience`` readings in a row
    throughput_ratio: float = 0.33
    throughput_patience: int = 3
    #: least time that these have cost. Measured: on a busy machine four steps of 1 ms take 14, by chance
    throughput_seconds: float = 0.1

    #: readings left out at the start: optimizer state, caching allocators
    memory_warmup: int = 50
    memory_window: int = 200
    #: growth within a window that is reported, relative and in GiB
    memory_ratio: float = 0.01
    memory_gib: float = 0.0625

    def __post_init__(self) -> None:
        given: object = self.kinds
        with Faults("AlertSettings") as faults:
            if isinstance(given, str) or not isinstance(given, Iterable):
                faults.add(f"kinds={given!r}", "a list of kinds", f"write kinds=[{str(given)!r}]")
            else:
                object.__setattr__(self, "kinds", tuple(self.kinds))
                for kind in (kind for kind in self.kinds if kind not in RULE_KINDS):
                    faults.unknown("kind", kind, RULE_KINDS)
            for item in fields(self):
                if item.name != "kinds":
                    _check(item.name, getattr(self, item.name), cast("float", item.default), faults)

    @classmethod
    def of(cls, given: bool | Mapping[str, Any] | AlertSettings | None) -> AlertSettings:
        """What a user wrote: nothing or True for the defaults, False for no rule at all, a mapping of fields.

        Raises:
            PlanError: an unknown field, with the nearest names, or a value out of its range.
        """
        if isinstance(given, AlertSettings):
            return given
        if given is None or given is True:
            return cls()
        if given is False:
            return cls(kinds=())
        known = [item.name for item in fields(cls)]
        with Faults("AlertSettings") as faults:
            if not isinstance(given, Mapping):
                allowed = "None, False, a mapping or AlertSettings(...)"
                faults.add(f"alerts={given!r}", allowed, "leave it out for the defaults")
            else:
                for key in (key for key in given if key not in known):
                    faults.unknown("field", key, known)
        return cls(**given)


def _check(name: str, value: object, default: float, faults: Faults) -> None:
    leave = f"leave it out for the default, {default:g}"
    if not is_number(value) or value <= 0:
        faults.add(f"{name}={value!r}", "a finite number > 0", leave)
    elif isinstance(default, int) and not isinstance(value, int):
        faults.add(f"{name}={value!r}", "a whole number", leave)
    elif name.endswith("window") and value < SMALLEST_WINDOW:
        faults.add(f"{name}={value!r}", f"at least {SMALLEST_WINDOW}", leave)
