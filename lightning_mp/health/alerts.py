"""Rules that watch the numbers of a run and report suspicious ones as events. No torch is imported.

:class:`Alerts` takes one reading after another and returns events. :class:`AlertSettings` holds the
thresholds, with the source of each.
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

#: the smallest window; the median, spread or trend of fewer numbers is meaningless
SMALLEST_WINDOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """The thresholds of the rules. Windows and counts are numbers of readings.

    With a reading every n steps they last n times as many steps. "Measured" below: runs of 2,000
    steps of small GPT-2 and MLP models in fp32, 16-mixed and bf16-mixed, with several seeds and
    batches of 4 to 32.

    Raises:
        PlanError: values out of their range, or kinds that no rule reports. All are named.
    """

    #: the rules that run; leave a kind out to silence it
    kinds: tuple[Kind, ...] = RULE_KINDS

    #: The number of earlier gradient norms whose median a norm is compared with. No norm is judged
    #: before there are as many.
    spike_window: int = 50
    #: The least ratio of a spike to the median. Measured: healthy norms stay below 7 until training
    #: is complete, and a bad batch is at 115 or more.
    spike_ratio: float = 10.0
    #: The least distance of a spike from the median, in standard deviations. They are estimated
    #: from the median absolute deviation. Measured: healthy norms reach 34.
    spike_sigmas: float = 30.0
    #: A norm below this part of the first window's median is harmless. Measured: models that have
    #: memorised their data have a hundredth of their first norms, which rise 39-fold and recover.
    spike_level: float = 0.25
    #: A norm of this many times the median is a spike even below ``spike_level``.
    spike_far: float = 100.0

    #: The number of losses whose median is a level. No loss is judged before there are as many.
    divergence_window: int = 50
    #: The number of high readings in a row. A single high reading is a bad batch.
    divergence_patience: int = 3
    #: A reading is high if it loses this part of all progress, from the first losses to the lowest
    #: level. Measured: healthy runs lose up to 0.42. Runs at 30 times their rate lose 0.57 or more.
    divergence_progress: float = 0.5
    #: The mean of the high readings must be this many standard deviations above the lowest level,
    #: and each reading half as many.
    divergence_sigmas: float = 6.0

    #: the number of readings in which nothing moves, or the loss is flat
    plateau_window: int = 200
    #: the norm falls if the median of the later half is below this part of the earlier half's
    plateau_falling: float = 0.9
    #: the loss is flat if the means of the two halves differ by at most this many standard errors
    plateau_errors: float = 2.0
    #: Weights do not move if the update ratio is below this part of its largest value so far. A
    #: plateau is then no convergence.
    plateau_still: float = 1e-3

    #: the number of skips in a row. Measured: warm-up from a scale of 65,536 has up to 5.
    streak_skips: int = 6

    #: the number of skips at the lowest scale, among the last 10 readings
    collapse_skips: int = 3

    #: The number of earlier scales of an FP8 layer whose median a scale is compared with. No scale
    #: is judged before there are as many.
    scale_window: int = 16
    #: The least factor of a jump, up or down. Measured: scales of inputs and weights stay within
    #: 2.2 times the median.
    scale_ratio: float = 8.0
    #: The number of a gradient's scales in a row that must jump. Measured: one sample changes such
    #: a scale by up to 34 times.
    scale_patience: int = 3

    #: the number of readings left out at the start, because of compilation and caches
    throughput_warmup: int = 20
    #: The number of readings whose median is the speed. A single slow reading is the machine's.
    throughput_window: int = 20
    #: a speed below this part of the best is a drop
    throughput_ratio: float = 0.33

    #: the number of readings left out at the start, because of optimizer states and the allocator
    memory_warmup: int = 50
    #: the number of readings in which memory has to grow
    memory_window: int = 200
    #: the least growth within a window that is reported, relative ...
    memory_ratio: float = 0.01
    #: ... and in GiB; the larger of the two counts
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
        """Return the settings that a user's argument means.

        ``None`` and True mean the defaults. False means no rule. A mapping gives fields.

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


#: The numbers of an optimizer step, under the names of :mod:`~lightning_mp.record.metric_names` and
#: the names below. Rules skip a number that is missing, ``None`` or not finite.
Reading = Mapping[str, Any]
#: keys of two booleans: the step was skipped; the loss scale after it is at its lowest value
SKIPPED, AT_FLOOR = "skipped", "scale_at_floor"
#: the key of the FP8 layers' scales: a mapping of (layer, role) to the scale, or ``None``
FP8_SCALES = "fp8_scales"
Window = deque[float]


def _full(window: Window) -> bool:
    return len(window) == window.maxlen


def _medians(window: Window, count: int) -> list[float]:
    """Return the medians of ``count`` consecutive pieces of the window.

    The lengths of the pieces differ by one at most.
    """
    edges = [len(window) * edge // count for edge in range(count + 1)]
    return [median(islice(window, first, last)) for first, last in pairwise(edges)]


def _sigma(values: Iterable[float], center: float) -> float:
    """Return the standard deviation of normal numbers around ``center``.

    It is estimated from their median absolute deviation.
    """
    return 1.4826 * median([abs(value - center) for value in values])


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of two or more ``values``, and its standard error."""
    center = fmean(values)
    variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    return center, math.sqrt(variance / len(values))


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


#: the advice for an overflow at every loss scale; ``{pinned}`` becomes the name of the way to pin
_BEYOND_FP16 = (
    "pin the module that the nonfinite events name, by {pinned} (suggest_pins measures which); or use 'bf16-mixed', "
    "which needs no loss scale"
)
#: (likely cause, advice) by kind of event, or by observation if a kind has several causes
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
    """A rule's condition that holds in a reading.

    ``value`` is the offending number. ``text`` is a key of the texts, by default the rule's kind.
    ``severity`` replaces the rule's severity. ``module`` names the module with the problem.
    """

    value: float
    evidence: Mapping[str, Any]
    text: str = ""
    severity: Severity | None = None
    module: str | None = None


class Rule:
    """A condition over readings. An event is made when the condition begins.

    The next event comes only after ``readings_between`` readings without the condition.
    """

    kind: ClassVar[Kind]
    #: the name of the number that the rule reads
    reads: str
    severity: ClassVar[Severity] = "warning"
    #: the number of readings without the condition before the next event
    readings_between: ClassVar[int] = 10
    #: the count of known numbers so far
    seen = 0
    #: the number of readings before the next event
    cooldown = 0
    #: the last evaluated step; no step is evaluated twice
    last_step: int | None = None

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        self._windows: dict[str, Window] = {}

    def window(self, name: str, size: int) -> Window:
        """Return the window of the last ``size`` numbers under ``name``. Create it if it is new."""
        return self._windows.setdefault(name, deque(maxlen=size))

    def evaluate(self, reading: Reading, under_plan: bool) -> Event | None:
        """Return the event if the condition begins in this reading, else ``None``.

        ``None`` too for a step that was evaluated before.
        """
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
        """Return the event of ``condition``.

        Its advice names the plan's pins if ``under_plan``, else DtypePinning.
        """
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
        """Add a known number to the windows. Return the condition if it holds, else ``None``.

        It is returned as well if it held in the reading before. A subclass must override this.
        """
        raise NotImplementedError


#: the number of first losses whose median is the start of the run's progress
_FIRST = 5


class GradNormSpike(Rule):
    """A gradient norm far above the median of earlier norms.

    It is far both as a ratio and in robust standard deviations, because noise fools either alone. A
    norm that is small compared with the run's first norms must be farther away. The verdict is the
    same if all norms are multiplied by one number.
    """

    kind, reads = "grad_norm_spike", metric_names.GRAD_NORM
    #: the median of the first full window
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
    """Several losses in a row that lose much of the run's progress, far above the noise.

    Losses are compared by progress and not by ratio. A loss may be negative, and a loss near zero
    may grow tenfold for no reason. For each earlier loss in the window that was as high, one more
    high loss in a row is needed.
    """

    kind, reads = "loss_divergence", metric_names.LOSS
    severity = "error"
    readings_between = 50
    #: the lowest median of a window, and the standard deviation in that window
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
        """True if enough losses in a row are high. The window ``high`` holds them.

        A loss that is not high empties that window.
        """
        first, losses, high = (self._windows[name] for name in ("first", "losses", "high"))
        rise, far = loss - self.lowest, math.inf
        # This is seldom true, and the rest is expensive.
        if rise > 0 and rise > self.settings.divergence_progress * (median(first) - self.lowest):
            # The lowest level's spread may be small by chance, so the present spread counts too.
            far = self.settings.divergence_sigmas * max(self.spread, _sigma(losses, median(losses)))
        if rise <= far / 2:
            high.clear()
            return False
        before = list(losses)[: max(0, len(losses) - len(high))]
        high.append(loss)
        enough = self.settings.divergence_patience + sum(other >= min(high) for other in before)
        return len(high) >= enough and sum(high) / len(high) - self.lowest > far


#: half the relative distance between fp32 numbers; a smaller update moves no weight
_FP32_ROUNDING = 2.0**-24
#: a learning rate that changes by more than this factor within the window follows a schedule
_STEADY = 1.01


class LossPlateau(Rule):
    """A window in which no weight moves, or in which the loss is flat.

    No weight moves if gradients are zero and the loss is not, or if the update ratio is almost 0.
    This is a warning. A flat loss while weights move is saturated learning, reported as info once a
    run, and only after warm-up.

    There is no event while the gradient norm falls, because that is convergence. A small update
    ratio is not reported while the learning rate changes: its schedule may have stopped them.
    """

    kind, reads = "loss_plateau", metric_names.LOSS
    readings_between = 100
    #: the largest median update ratio of half a window
    peak = 0.0
    #: True once this run's saturated learning was reported
    reported_saturated = False

    def judge(self, value: float, reading: Reading) -> Condition | None:
        for name in (metric_names.LOSS, metric_names.GRAD_NORM, metric_names.UPDATE_RATIO, metric_names.LR):
            number = _known(reading.get(name))
            # The evidence has the names without the loggers' group ("train/").
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
        """True if the loss is flat within its noise, after warm-up, unless this run was told so."""
        warms_up = bool(rates) and rates[-1] > _STEADY * rates[0]
        if self.reported_saturated or warms_up or not _full(norms):
            return False
        half = len(losses) // 2
        earlier, earlier_error = _mean_and_error(list(losses)[:half])
        later, later_error = _mean_and_error(list(losses)[half:])
        error = math.hypot(earlier_error, later_error)
        return abs(earlier - later) <= self.settings.plateau_errors * error


#: A loss scale below it makes gradients smaller and cannot help. torch's scaler has no floor.
_USELESS = 1.0
#: the number of last readings in which skips are counted
_RECENT = 10
#: torch's initial scale. At or above it a scaler still searches: DeepSpeed may start at 2**32.
_SEARCHING = 2.0**16


class ScaleCollapse(Rule):
    """Several skipped steps among the last readings, at the lowest scale or at a scale below 1."""

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
    """More skipped steps in a row than the search for a scale takes.

    Skips at a scale of 65,536 or above are not counted.
    """

    kind, reads = "skip_streak", SKIPPED
    readings_between = 1
    #: the skips in a row, and how many of them had a scale of 65,536 or above
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
    """A scale of an FP8 layer that is far from the median of its earlier values, up or down.

    Each layer has three scales: of its input, its weight and the gradient of its output. A
    gradient's scale has to stay away for several readings, because one sample can change it.

    A reading has at most one event, for scales that did not jump in the last readings. A jump
    spreads from layer to layer. So the event names the first layer whose input or weight jumped. If
    only gradients jumped, it names the last of these layers, where the backward pass begins.
    """

    kind, reads = "scale_jump", FP8_SCALES

    def __init__(self, settings: AlertSettings) -> None:
        super().__init__(settings)
        #: by (layer, role), the number of readings before the scale's next event
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
        """Add a scale to its window. Return the condition if it has jumped, else ``None``.

        A gradient's scale jumps if all its last ``scale_patience`` values are far from the median
        of the values before. For other scales the last value counts.
        """
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


#: the number of pieces of the window; their medians must rise from piece to piece
_PIECES = 8


class MemoryGrowth(Rule):
    """Memory that grows in every piece of the window, by enough to matter."""

    kind, reads = "memory_growth", metric_names.MEMORY_ALLOCATED

    def judge(self, value: float, reading: Reading) -> Condition | None:
        if self.seen <= self.settings.memory_warmup:
            return None
        kept, steps = (self.window(name, self.settings.memory_window) for name in ("memory", "steps"))
        kept.append(value)
        steps.append(reading[metric_names.STEP])
        if not _full(kept) or value <= kept[0]:  # a cheap check that ends here in most runs
            return None
        levels = _medians(kept, _PIECES)
        grown = levels[-1] - levels[0]
        worth = max(self.settings.memory_gib, self.settings.memory_ratio * levels[0])
        if grown < worth or not all(before < after for before, after in pairwise(levels)):
            return None
        rate = 1000 * grown / (steps[-1] - steps[0])
        return Condition(value, {"memory_gib": value, "before": levels[0], "gib_per_1000_steps": rate})


class ThroughputDrop(Rule):
    """A median speed of the last readings far below the best so far.

    It is in tokens per second, or in samples per second if tokens are unknown.
    """

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


#: the rules, in the order of their events
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
    """The rules over the readings of one run. :meth:`AlertSettings.of` reads ``settings``."""

    def __init__(self, settings: bool | Mapping[str, Any] | AlertSettings | None = None) -> None:
        self.settings = AlertSettings.of(settings)
        #: True if advice names the plan's fields instead of callbacks
        self.under_plan = False
        self.rules = [rule(self.settings) for rule in _RULES if rule.kind in self.settings.kinds]

    def judge(self, reading: Reading, *, only: Collection[Kind] = RULE_KINDS) -> list[Event]:
        """Return the events that begin in ``reading``. The caller adds rank and action.

        Only rules of the kinds ``only`` run. A rule evaluates a step once. So some rules can run
        before the optimizer's step, and the rest after it.
        """
        events = (rule.evaluate(reading, self.under_plan) for rule in self.rules if rule.kind in only)
        return [event for event in events if event is not None]

    def holds(self, kind: Kind) -> bool:
        """True if a rule's condition held in the last reading, with or without an event.

        Always False for ``scale_jump``, which has a condition for each scale.
        """
        return any(rule.kind == kind and rule.cooldown == rule.readings_between for rule in self.rules)
