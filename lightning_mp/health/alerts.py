"""The rules that watch a run's numbers and report what looks wrong: state machines over readings; no torch here.

:class:`Alerts` takes one reading after another and answers with events; :class:`AlertSettings` holds every threshold,
with where its number comes from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice, pairwise
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple, cast

from lightning_mp.errors import Faults, is_number
from lightning_mp.record import metric_names
from lightning_mp.record.events import KINDS, Event, Kind, Severity

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

    #: readings in which nothing moves, or the loss is flat
    plateau_window: int = 200
    #: the gradient norm is falling when the later half's median is below this part of the earlier half's
    plateau_falling: float = 0.9
    #: a loss is flat when the means of the two halves differ by less than this many standard errors
    plateau_errors: float = 2.0
    #: share of the largest update ratio so far; below it weights no longer move, and a plateau is not convergence
    plateau_still: float = 1e-3

    #: skips in a row; warm-up under a scale of 65,536 was measured to have up to 5
    streak_skips: int = 6

    #: skips while the scale is at its floor, of the last 10 readings
    collapse_skips: int = 3

    #: scales of an FP8 layer whose median the next one is compared with, as soon as there are as many
    scale_window: int = 16
    #: times the median, or a part of it as small. Measured: scales of inputs and weights stay within 2.2 times ...
    scale_ratio: float = 8.0
    #: ... one sample moves a gradient's by up to 34 times: so many in a row have to be that far off
    scale_patience: int = 3

    #: readings left out at the start: compilation, caches
    throughput_warmup: int = 20
    #: readings whose median is the speed: a single slow one is the machine's
    throughput_window: int = 20
    #: share of the best such median
    throughput_ratio: float = 0.33

    #: readings left out at the start: optimizer state, caching allocators
    memory_warmup: int = 50
    memory_window: int = 200
    #: growth within a window that is reported, relative and in GiB
    memory_ratio: float = 0.01
    memory_gib: float = 0.0625

    def __post_init__(self) -> None:
        with Faults("AlertSettings") as faults:
            object.__setattr__(self, "kinds", tuple(self.kinds))
            for kind in (kind for kind in self.kinds if kind not in RULE_KINDS):
                faults.unknown("kind", kind, RULE_KINDS)
            for item in fields(self)[1:]:
                value, default = getattr(self, item.name), cast("float", item.default)
                least = SMALLEST_WINDOW if item.name.endswith("window") else 1
                if isinstance(default, int):
                    faults.whole(item.name, value, least, f"the default is {default}")
                elif not is_number(value) or value <= 0:
                    faults.add(f"{item.name}={value!r}", allowed="a number > 0", fix=f"the default is {default:g}")

    @classmethod
    def of(cls, given: bool | Mapping[str, Any] | AlertSettings | None) -> AlertSettings:
        """What a user wrote: nothing or True for the defaults, False for no rule at all, a mapping of fields.

        Raises:
            PlanError: an unknown field, with the nearest names, or a value out of its range.
        """
        if isinstance(given, AlertSettings):
            return given
        if not isinstance(given, Mapping):
            return cls(kinds=()) if given is False else cls()
        with Faults("AlertSettings") as faults:
            for key in (key for key in given if key not in cls.__dataclass_fields__):
                faults.unknown("field", key, cls.__dataclass_fields__)
        return cls(**given)


#: the numbers of an optimizer step by the names of :mod:`~lightning_mp.record.metric_names`, and the two below; rules
#: skip what is not there, ``None`` or not finite
Reading = Mapping[str, Any]
#: whether nothing was applied in the step, and whether the loss scale after it can fall no further
SKIPPED, AT_FLOOR = "skipped", "scale_at_floor"
#: the scales of FP8 layers, a mapping of (layer, role) to the scale; ``None`` in a reading without
FP8_SCALES = "fp8_scales"
Window = deque[float]


def _full(window: Window) -> bool:
    return len(window) == window.maxlen


def _medians(window: Window, count: int) -> list[float]:
    """Those of ``count`` pieces of it in order, none shorter than another by more than one."""
    edges = [len(window) * edge // count for edge in range(count + 1)]
    return [median(islice(window, first, last)) for first, last in pairwise(edges)]


def _sigma(values: Iterable[float], center: float) -> float:
    """The standard deviation of normal numbers around ``center``, from their median absolute deviation."""
    return 1.4826 * median([abs(value - center) for value in values])


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of ``values`` and its standard error."""
    center = fmean(values)
    variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    return center, math.sqrt(variance / len(values))


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


#: for an overflow that no loss scale can help; ``{pinned}`` is what pins modules in this run
_BEYOND_FP16 = (
    "pin the module that the nonfinite events name, by {pinned} (suggest_pins measures which); or use 'bf16-mixed', "
    "which needs no loss scale"
)
#: the likely cause and what to do, by kind of event, or by what was seen where a kind has several causes
_TEXTS: dict[str, tuple[str, str]] = {
    "grad_norm_spike": (
        "a bad batch, or a learning rate that is too high here",
        "look at this batch; clip gradients (gradient_clip_val=1.0); lower the learning rate if it happens again",
    ),
    "loss_divergence": (
        "a learning rate that is too high, or weights spoiled by a bad step",
        "go back to the last good checkpoint with a lower rate, and clip gradients; try suggest_pins in half precision",
    ),
    "zero gradients": (
        "all gradients are zero, so the loss does not depend on the weights",
        "look for detach(), no_grad, dead activations or a loss multiplied by zero",
    ),
    "zero rate": ("the learning rate is 0", "look at the schedule's length and its last value"),
    "still": (
        "weights do not move, since the learning rate is far too small or updates round to nothing",
        "raise the learning rate, keep fp32 weights ('bf16-mixed', not 'bf16-true'), see that the optimizer has them",
    ),
    "saturated": (
        "the loss is flat within its noise while gradients are as large as before: learning is saturated at this rate",
        "compare with the validation loss; lower the learning rate or raise the batch size, or end the run",
    ),
    "scale_collapse": (
        "gradients overflow at every scale, since weights or activations are beyond fp16's range",
        f"stop; go back to the last good checkpoint, {_BEYOND_FP16}",
    ),
    "skip_streak": (
        "gradients overflow at every scale, since an activation or a weight is beyond fp16's 65,504 or not finite",
        _BEYOND_FP16,
    ),
    "skips without a scale": (
        "the data, the loss or a weight is not finite",
        "look at the batch and the module that the nonfinite events name; go back to the last good checkpoint",
    ),
    "scale drop": (
        "the numbers of this layer have grown at once: overflow and NaN come next",
        "look at this batch; clip gradients; lower the learning rate; leave the layer out: FP8(skip=('{module}',))",
    ),
    "scale rise": (
        "the numbers of this layer have shrunk at once: small ones become zero in the next steps",
        "look at this batch, at dead activations and at a loss that vanishes; or FP8(skip=('{module}',))",
    ),
    "memory_growth": (
        "something is kept from step to step, such as losses with their graph, outputs in a list or a growing cache",
        "append loss.detach() or loss.item(), not loss; clear lists at the end of an epoch",
    ),
    "throughput_drop": (
        "slow data loading, another job on the machine, or a device that throttles",
        "raise num_workers or check the storage; look at the device's utilisation and clocks",
    ),
}


class Condition(NamedTuple):
    """One that holds in a reading: the offending number, the evidence, and a key of the texts.

    ``severity`` replaces that of the rule; ``module`` is the one concerned.
    """

    value: float
    evidence: Mapping[str, Any]
    text: str = ""
    severity: Severity | None = None
    module: str | None = None


class Rule:
    """One condition. An event is made when it begins, and not again before ``readings_between`` without it."""

    kind: ClassVar[Kind]
    #: the number of a reading that the rule looks at
    reads: str
    severity: ClassVar[Severity] = "warning"
    #: readings without the condition before the next event
    readings_between: ClassVar[int] = 10
    #: how many known numbers there were so far
    seen = 0
    #: readings before the next event
    cooldown = 0
    #: the last step, which is not evaluated twice
    last_step: int | None = None

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        self._windows: dict[str, Window] = {}

    def window(self, name: str, size: int) -> Window:
        """The last ``size`` numbers kept as ``name``."""
        return self._windows.setdefault(name, deque(maxlen=size))

    def evaluate(self, reading: Reading, under_plan: bool) -> Event | None:
        """The event of a condition that begins in this reading."""
        if reading[metric_names.STEP] == self.last_step:
            return None
        step = self.last_step = reading[metric_names.STEP]
        value = _known(reading.get(self.reads))
        self.seen += value is not None
        condition = None if value is None else self.judge(value, reading)
        begins = self.cooldown == 0
        self.cooldown = max(0, self.cooldown - 1) if condition is None else self.readings_between
        return self.event(condition, step, under_plan) if condition is not None and begins else None

    def event(self, condition: Condition, step: int, under_plan: bool) -> Event:
        """Return the event of ``condition``; its advice names the plan's fields ``under_plan``, else callbacks."""
        cause, advice = _TEXTS[condition.text or self.kind]
        pinned = "the plan's pins" if under_plan else "DtypePinning"
        return Event(
            step=step,
            kind=self.kind,
            severity=condition.severity or self.severity,
            module=condition.module,
            value=condition.value,
            evidence=condition.evidence,
            cause=cause,
            advice=advice.format(pinned=pinned, module=condition.module),
        )

    def judge(self, value: float, reading: Reading) -> Condition | None:
        """Add a known number to the windows; the condition if it holds, whether or not it held before."""
        raise NotImplementedError


#: of a loss: the first ones, whose median is where the run began
_FIRST = 5


class GradNormSpike(Rule):
    """A norm far above the median, as a ratio and in robust standard deviations: either alone is fooled by noise.

    A norm that is small compared with the first ones of the run has to be farther off. The verdict does not change when
    every norm is multiplied by the same number.
    """

    kind, reads = "grad_norm_spike", metric_names.GRAD_NORM
    #: the first full window's median
    level: float | None = None

    def judge(self, value: float, reading: Reading) -> Condition | None:
        norms, settings = self.window("norms", self.settings.spike_window), self.settings
        before = list(norms)
        norms.append(value)
        if self.level is None and _full(norms):
            self.level = median(norms)
        center = median(before) if len(before) == norms.maxlen else math.inf
        if value <= center:
            return None
        ratio = value / center if center else math.inf
        spread = _sigma(before, center)
        sigmas = (value - center) / spread if spread else math.inf
        harmless = value < settings.spike_level * (self.level or 0.0) and ratio < settings.spike_far
        if ratio < settings.spike_ratio or sigmas < settings.spike_sigmas or harmless:
            return None
        numbers = {"grad_norm": value, "median": center, "ratio": ratio, "sigmas": sigmas, "window": len(before)}
        return Condition(value, numbers)


class LossDivergence(Rule):
    """Several readings in a row that lose much of the run's progress and lie far above the noise of its lowest level.

    Progress rather than a ratio, because a loss may be negative, and one near zero may grow tenfold for no reason. For
    every reading in the window before that was as high, one more in a row is needed.
    """

    kind, reads = "loss_divergence", metric_names.LOSS
    severity = "error"
    readings_between = 50
    #: the lowest median of a window, and the standard deviation in it
    lowest, spread = math.inf, 0.0

    def judge(self, value: float, reading: Reading) -> Condition | None:
        size = self.settings.divergence_window
        first, losses, high = self.window("first", _FIRST), self.window("losses", size), self.window("high", size)
        condition = None
        if self._is_high(value):
            numbers = {"loss": value, "lowest": self.lowest, "first": median(first), "readings": len(high)}
            condition = Condition(value, numbers)
        if not _full(first):
            first.append(value)
        losses.append(value)
        if _full(losses) and (level := median(losses)) < self.lowest:
            self.lowest, self.spread = level, _sigma(losses, level)
        return condition

    def _is_high(self, loss: float) -> bool:
        """Whether enough readings in a row are high; ``high`` holds them."""
        first, losses, high = (self._windows[name] for name in ("first", "losses", "high"))
        rise, far = loss - self.lowest, math.inf
        # seldom, and what follows costs more
        if rise > 0 and rise > self.settings.divergence_progress * (median(first) - self.lowest):
            # the quietest stretch was quiet by chance, too
            far = self.settings.divergence_sigmas * max(self.spread, _sigma(losses, median(losses)))
        if rise <= far / 2:
            high.clear()
            return False
        before = list(losses)[: max(0, len(losses) - len(high))]
        high.append(loss)
        enough = self.settings.divergence_patience + sum(other >= min(high) for other in before)
        return len(high) >= enough and sum(high) / len(high) - self.lowest > far


#: half the distance between fp32 numbers, relatively: no weight moves by less
_FP32_ROUNDING = 2.0**-24
#: a learning rate that changes by more than this within the window is a schedule at work
_STEADY = 1.01


class LossPlateau(Rule):
    """Nothing moves for a window, or the loss is flat for one while the gradient norm does not fall.

    Nothing moves if gradients are zero though the loss is not, or if the update ratio is next to nothing. This is a
    warning. A flat loss of weights that still move is saturated learning: info, once a run. A gradient norm that falls
    is convergence. A rate that changes is a schedule at work: it may have stopped the weights. A flat loss is judged
    only after warm-up.
    """

    kind, reads = "loss_plateau", metric_names.LOSS
    readings_between = 100
    #: the largest median update ratio of half a window
    peak = 0.0
    #: whether this run's saturated learning was reported
    reported_saturated = False

    def judge(self, value: float, reading: Reading) -> Condition | None:
        for name in (metric_names.LOSS, metric_names.GRAD_NORM, metric_names.UPDATE_RATIO, metric_names.LR):
            number = _known(reading.get(name))
            # in the evidence without the group of the loggers
            window = self.window(name.rpartition("/")[2], self.settings.plateau_window)
            window.extend([] if number is None else [number])
        losses, norms, ratios, rates = self._windows.values()
        if _full(ratios):
            self.peak = max(self.peak, _medians(ratios, 2)[1])
        if not _full(losses) or median(losses) == 0 or self._norms_fall(norms):
            return None
        why, severity = self._why(norms, ratios, rates), None
        if why is None and self._is_saturated(losses, norms, rates):
            why, severity = "saturated", "info"
            self.reported_saturated = True
        if why is None:
            return None
        numbers: dict[str, Any] = {name: median(window) for name, window in self._windows.items() if window}
        return Condition(value, {**numbers, "window": len(losses)}, why, severity)

    def _norms_fall(self, norms: Window) -> bool:
        if not _full(norms):
            return False
        earlier, later = _medians(norms, 2)
        return later < self.settings.plateau_falling * earlier

    def _why(self, norms: Window, ratios: Window, rates: Window) -> str | None:
        if _full(norms) and norms[-1] == 0 and median(norms) == 0:
            return "zero gradients"
        least = max(_FP32_ROUNDING, self.settings.plateau_still * self.peak)
        scheduled = _full(rates) and max(rates) > _STEADY * min(rates)
        if scheduled or not _full(ratios) or median(ratios) > least:
            return None
        return "zero rate" if rates and rates[-1] == 0 else "still"

    def _is_saturated(self, losses: Window, norms: Window, rates: Window) -> bool:
        """True if the loss is flat within its noise, after warm-up, and this run has not been told so."""
        warms_up = bool(rates) and rates[-1] > _STEADY * rates[0]
        if self.reported_saturated or warms_up or not _full(norms):
            return False
        half = len(losses) // 2
        earlier, earlier_error = _mean_and_error(list(losses)[:half])
        later, later_error = _mean_and_error(list(losses)[half:])
        error = math.hypot(earlier_error, later_error)
        return abs(earlier - later) <= self.settings.plateau_errors * error


#: a loss scale below it makes gradients smaller than they are and cannot help (torch's scaler has no floor)
_USELESS = 1.0
_RECENT = 10
#: torch's initial scale; above it a scaler is still warming up to one that fits (DeepSpeed may start at 2**32)
_SEARCHING = 2.0**16


class ScaleCollapse(Rule):
    """Several of the last readings were skips at the scale's floor, or at a scale below one."""

    kind, reads = "scale_collapse", metric_names.LOSS_SCALE
    severity = "error"

    def judge(self, value: float, reading: Reading) -> Condition | None:
        low = reading.get(AT_FLOOR) or value < _USELESS
        skips = self.window("skips", _RECENT)
        skips.append(float(low and reading[SKIPPED]))
        count = int(sum(skips))
        if not low or count < self.settings.collapse_skips:
            return None
        return Condition(value, {"loss_scale": value, "skipped_at_floor": count, "of_readings": len(skips)})


class SkipStreak(Rule):
    """More skips in a row than it takes to find a scale from 65,536 on; skips at higher scales are not counted."""

    kind, reads = "skip_streak", SKIPPED
    readings_between = 1
    #: the skips in a row, and how many of them were made while the scale was still above
    skips = scale_warmup = 0

    def judge(self, value: float, reading: Reading) -> Condition | None:
        scale, skips = reading.get(metric_names.LOSS_SCALE), self.skips + 1 if value else 0
        self.skips = skips
        self.scale_warmup = skips if scale is not None and scale >= _SEARCHING else min(self.scale_warmup, skips)
        if skips - self.scale_warmup < self.settings.streak_skips:
            return None
        if scale is None:
            return Condition(float(skips), {"skips_in_a_row": skips}, "skips without a scale")
        return Condition(float(skips), {"skips_in_a_row": skips, "loss_scale": scale})


class ScaleJump(Rule):
    """A scale of an FP8 layer that is far from the median of its last ones, below or above.

    Each layer has three: of its input, its weight and the gradient of its output. A gradient's scale has to stay away
    for several readings, because one sample can change it.

    A reading has one event at most, of a scale that did not jump in the last readings. A jump is passed on from layer
    to layer. So the event names the first layer whose input or weight jumped. If only gradients did, it names the last
    layer, where the backward pass begins.
    """

    kind, reads = "scale_jump", FP8_SCALES

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        #: readings before a scale's next event
        self._cooldowns: dict[tuple[str, str], int] = {}

    def evaluate(self, reading: Reading, under_plan: bool) -> Event | None:
        scales: Mapping[tuple[str, str], float] | None = reading.get(self.reads)
        step = reading[metric_names.STEP]
        if scales is None or step == self.last_step:
            return None
        self.last_step = step
        jumps: list[Condition] = []
        for key, scale in scales.items():
            cooldown = self._cooldowns.get(key, 0)
            jump = self._jump(key, scale)
            self._cooldowns[key] = max(0, cooldown - 1) if jump is None else self.readings_between
            if jump is not None and cooldown == 0:
                jumps.append(jump)
        if not jumps:
            return None
        forward = [jump for jump in jumps if jump.evidence["role"] != "gradient"]
        origin = forward[0] if forward else jumps[-1]
        evidence = {**origin.evidence, "scales_that_jumped": len(jumps)}
        return self.event(origin._replace(evidence=evidence), step, under_plan)

    def _jump(self, key: tuple[str, str], scale: float) -> Condition | None:
        """Add a scale to its window. Return the condition if the last ones are far from the median of those before."""
        layer, role = key
        patience = self.settings.scale_patience if role == "gradient" else 1
        window = self.window(f"{role} {layer}", self.settings.scale_window + patience)
        window.append(scale)
        if not _full(window):
            return None
        scales = list(window)
        before, last = median(scales[:-patience]), scales[-patience:]
        drop, rise = before / max(last), min(last) / before
        factor = max(drop, rise)
        if factor < self.settings.scale_ratio:
            return None
        change = "drop" if drop > rise else "rise"
        numbers = {"role": role, "change": change, "factor": factor, "scale": scale, "median": before}
        return Condition(scale, numbers, f"scale {change}", module=layer)


#: pieces of the window whose medians all have to rise
_PIECES = 8


class MemoryGrowth(Rule):
    """The median of every piece of the window lies above the one before, and the growth is large enough to matter."""

    kind, reads = "memory_growth", metric_names.MEMORY_ALLOCATED

    def judge(self, value: float, reading: Reading) -> Condition | None:
        if self.seen <= self.settings.memory_warmup:
            return None
        kept, steps = (self.window(name, self.settings.memory_window) for name in ("memory", "steps"))
        kept.append(value)
        steps.append(reading[metric_names.STEP])
        if not _full(kept) or value <= kept[0]:  # in most runs it does not grow, and the check is free
            return None
        levels = _medians(kept, _PIECES)
        grown = levels[-1] - levels[0]
        worth = max(self.settings.memory_gib, self.settings.memory_ratio * levels[0])
        if grown < worth or not all(before < after for before, after in pairwise(levels)):
            return None
        rate = 1000 * grown / (steps[-1] - steps[0])
        return Condition(value, {"memory_gib": value, "before": levels[0], "gib_per_1000_steps": rate})


class ThroughputDrop(Rule):
    """The median of the last readings is far below the best so far; tokens per second, or samples where not known."""

    kind = "throughput_drop"
    readings_between = 100
    #: the largest median of a window
    best = 0.0

    def evaluate(self, reading: Reading, under_plan: bool) -> Event | None:
        known = reading.get(metric_names.TOKENS_PER_S) is not None
        self.reads = metric_names.TOKENS_PER_S if known else metric_names.SAMPLES_PER_S
        return super().evaluate(reading, under_plan)

    def judge(self, value: float, reading: Reading) -> Condition | None:
        rates = self.window("rates", self.settings.throughput_window)
        if self.seen > self.settings.throughput_warmup:
            rates.append(value)
        if not _full(rates):
            return None
        rate = median(rates)
        self.best = max(self.best, rate)
        if rate >= self.settings.throughput_ratio * self.best:
            return None
        name, ratio = self.reads.rpartition("/")[2], rate / self.best
        return Condition(rate, {name: rate, "before": self.best, "ratio": ratio, "readings": len(rates)})


#: in the order in which their events are reported
_RULES = (
    GradNormSpike,
    LossPlateau,
    LossDivergence,
    ScaleCollapse,
    ScaleJump,
    SkipStreak,
    ThroughputDrop,
    MemoryGrowth,
)


class Alerts:
    """The rules over one run's readings. ``settings`` is whatever :meth:`AlertSettings.of` takes."""

    def __init__(self, settings: bool | Mapping[str, Any] | AlertSettings | None = None) -> None:
        self.settings = AlertSettings.of(settings)
        #: whether advice names the plan's fields, rather than callbacks
        self.under_plan = False
        self.rules = [rule(self.settings) for rule in _RULES if rule.kind in self.settings.kinds]

    def judge(self, reading: Reading, *, only: Collection[Kind] = RULE_KINDS) -> list[Event]:
        """The events that begin in ``reading``; rank, module and action are for the caller to fill in.

        ``only`` restricts it to rules of those kinds. A rule evaluates a step once, so that some rules can run before
        the optimizer's step and the rest after it.
        """
        events = (rule.evaluate(reading, self.under_plan) for rule in self.rules if rule.kind in only)
        return [event for event in events if event is not None]

    def holds(self, kind: Kind) -> bool:
        """Whether a rule's condition held in the last reading, though its event may have come before."""
        return any(rule.kind == kind and rule.cooldown == rule.readings_between for rule in self.rules)
