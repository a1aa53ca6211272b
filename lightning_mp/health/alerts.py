"""The rules that watch a run's numbers and report what looks wrong: state machines over readings; no torch here.

:class:`Alerts` takes one :class:`Reading` after another and answers with events; :class:`AlertSettings` holds every
threshold, with where its number comes from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice, pairwise
from statistics import median
from typing import Any, ClassVar, NamedTuple, cast

from lightning_mp.errors import Faults, is_number, pinning
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

    #: losses among which there is no fall
    plateau_window: int = 200
    #: a fall counts when it is more than this many standard errors
    plateau_sigmas: float = 3.0
    #: the gradient norm is falling when the later half's median is below this part of the earlier half's
    plateau_falling: float = 0.9
    #: share of the largest update ratio so far; below it weights no longer move, and a plateau is not convergence
    plateau_still: float = 1e-3
    #: share of the first losses; a level that lies less than this below them has not fallen, which is noted
    plateau_progress: float = 0.02

    #: skips in a row; warm-up under a scale of 65,536 was measured to have up to 5
    streak_skips: int = 6

    #: skips while the scale is at its floor, of the last 10 readings
    collapse_skips: int = 3

    #: an FP8 operand's scale jumps by this factor against the median of its last ``jump_steps`` readings ...
    jump_total: float = 64.0
    jump_steps: int = 20
    #: ... and by as many standard deviations of its logarithm. Measured: healthy gradients' move 30-fold a reading
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


# ---------------------------------------------------------------------- numbers


class Operand(NamedTuple):
    """Of one operand of an FP8 layer: the share of its values that were flushed to 0, of those that are not 0.

    ``scale`` is what ``amax``, the largest magnitude, is multiplied by; with a scale a row the smallest.
    """

    flushed: float
    amax: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The numbers of the optimizer step ``step``; ``None`` where one is not known: rules skip it.

    ``grad_norm`` is global, unscaled, before clipping. ``loss_scale`` is the one after the step, and
    ``scale_at_floor`` says whether it can fall no further. ``skipped``: nothing was applied in this step.
    ``seconds`` is the time of one step, from which ``tokens_per_s`` and ``samples_per_s`` are computed. ``fp8`` are the
    operands of the layers that run in FP8, by layer and role (``input``, ``weight``, ``gradient``).
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    update_ratio: float | None = None
    lost_updates: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    skips_in_a_row: int = 0
    scale_at_floor: bool = False
    lr: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    seconds: float | None = None
    memory_gib: float | None = None
    fp8: Mapping[tuple[str, str], Operand] = field(default_factory=dict[tuple[str, str], Operand])


#: a normal distribution's standard deviation in median absolute deviations
SIGMA = 1.4826
Window = deque[float]


def full(window: Window) -> bool:
    """Whether it holds as many as it can."""
    return len(window) == window.maxlen


def parts(window: Window, count: int) -> list[list[float]]:
    """``count`` pieces of it in order, none shorter than another by more than one."""
    edges = [len(window) * edge // count for edge in range(count + 1)]
    return [list(islice(window, first, last)) for first, last in pairwise(edges)]


def sigma(values: Iterable[float], center: float) -> float:
    """The standard deviation of normal numbers around ``center``, from their median absolute deviation."""
    return SIGMA * median([abs(value - center) for value in values])


def known(value: float | None) -> float | None:
    """The number if it is known and finite, else ``None``."""
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------- what is said

#: for an overflow that no loss scale can help; ``{pinned}`` is how modules are pinned in this run
_BEYOND_FP16 = (
    "pin the module that the nonfinite events name, as in {pinned} (suggest_pins measures which); or use 'bf16-mixed', "
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
    "not fallen": (
        "the loss is where it began, within its noise; weights move, and the gradient norm does not fall",
        "none needed if the validation loss improves; else see whether one batch can be overfitted",
    ),
    "lost_updates": (
        "weights are stored in half precision alone, where an update below half of the last bit changes nothing",
        "use the mixed mode, or torchao's _AdamW(bf16_stochastic_round=True); or raise the learning rate",
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
    "memory_growth": (
        "something is kept from step to step, such as losses with their graph, outputs in a list or a growing cache",
        "append loss.detach() or loss.item(), not loss; clear lists at the end of an epoch",
    ),
    "throughput_drop": (
        "slow data loading, another job on the machine, or a device that throttles",
        "raise num_workers or check the storage; look at the device's utilisation and clocks",
    ),
    "fp8_underflow": (
        "a few of its values are so large that most others are flushed to zero at the scale that these need",
        "keep the layer in bf16 with FP8(skip=('lm_head', {layer!r})), or use recipe='rowwise', with a scale per row",
    ),
    "scale fell": (
        "an outlier in the batch, or an activation that runs away, so that all other values lose precision",
        "look at the batch; clip gradients, or keep the layer in bf16 with FP8(skip=('lm_head', {layer!r}))",
    ),
    "scale rose": (
        "a layer before it is dead or was reset, so that its values are tiny",
        "look at the layers before it, and at what has changed their weights (a load, the learning rate)",
    ),
}


# ---------------------------------------------------------------------- rules

#: what a condition is about: the layer and the role of an FP8 operand, or the step as a whole
Subject = tuple[str, str]
_STEP: Subject = ("", "")


class Found(NamedTuple):
    """A condition that holds in a reading: the offending number, the evidence, and a key of the texts."""

    value: float
    evidence: Mapping[str, Any]
    text: str = ""


class Rule:
    """One condition. An event is made when it begins, and not again before ``readings_between`` without it."""

    kind: ClassVar[Kind]
    #: the field of a reading that the rule looks at
    reads: str
    severity: ClassVar[Severity] = "warning"
    #: readings without the condition before the next event
    readings_between: ClassVar[int] = 10
    #: how many known numbers there were so far
    seen = 0

    def __init__(self, settings: AlertSettings) -> None:
        self.settings = settings
        #: the last step, which is not evaluated twice
        self.last_step: int | None = None
        #: readings before the next event, for the step or for each FP8 operand
        self.cooldown: dict[Subject, int] = {}
        self._windows: dict[str | Subject, Window] = {}

    def window(self, name: str | Subject, size: int) -> Window:
        """The last ``size`` numbers kept as ``name``."""
        return self._windows.setdefault(name, deque(maxlen=size))

    def evaluate(self, reading: Reading, under_plan: bool) -> Event | None:
        """The event of a condition that begins in this reading, at most one; that of another operand waits its turn."""
        if reading.step == self.last_step:
            return None
        self.last_step = reading.step
        event: Event | None = None
        for subject, found in self.conditions(reading):
            cooling = self.cooldown.pop(subject, 0)
            if found is None:
                if cooling > 1:
                    self.cooldown[subject] = cooling - 1
            elif cooling:  # it goes on
                self.cooldown[subject] = self.readings_between
            elif event is None:
                self.cooldown[subject] = self.readings_between
                event = self._event(reading.step, subject[0], found, under_plan)
        return event

    def _event(self, step: int, layer: str, found: Found, under_plan: bool) -> Event:
        cause, advice = _TEXTS[found.text or self.kind]
        pinned = pinning(["…"], under_plan=under_plan).partition(", before")[0]
        return Event(
            step=step,
            kind=self.kind,
            severity="info" if found.text == "not fallen" else self.severity,
            module=layer or None,
            value=found.value,
            evidence=found.evidence,
            cause=cause,
            advice=advice.format(pinned=pinned, layer=layer),
        )

    def conditions(self, reading: Reading) -> Iterable[tuple[Subject, Found | None]]:
        """Add a reading to the windows; whether the condition holds, of the step or of each FP8 operand."""
        value = known(getattr(reading, self.reads))
        self.seen += value is not None
        return [(_STEP, None if value is None else self.judge(value, reading))]

    def judge(self, value: float, reading: Reading) -> Found | None:
        """Add a known number to the windows; the condition if it holds, whether or not it held before."""
        raise NotImplementedError


#: of a loss: the first ones, whose median is where the run began
_FIRST = 5


class GradNormSpike(Rule):
    """A norm far above the median, as a ratio and in robust standard deviations: either alone is fooled by noise.

    A norm that is small compared with the first ones of the run has to be farther off. The verdict does not change when
    every norm is multiplied by the same number.
    """

    kind, reads = "grad_norm_spike", "grad_norm"
    #: the first full window's median
    level: float | None = None

    def judge(self, value: float, reading: Reading) -> Found | None:
        norms, settings = self.window("norms", self.settings.spike_window), self.settings
        before = list(norms)
        norms.append(value)
        if self.level is None and full(norms):
            self.level = median(norms)
        center = median(before) if len(before) == norms.maxlen else math.inf
        if value <= center:
            return None
        ratio = value / center if center else math.inf
        spread = sigma(before, center)
        sigmas = (value - center) / spread if spread else math.inf
        harmless = value < settings.spike_level * (self.level or 0.0) and ratio < settings.spike_far
        if ratio < settings.spike_ratio or sigmas < settings.spike_sigmas or harmless:
            return None
        numbers = {"grad_norm": value, "median": center, "ratio": ratio, "sigmas": sigmas, "window": len(before)}
        return Found(value, numbers)


class LossDivergence(Rule):
    """Several readings in a row that lose much of the run's progress and lie far above the noise of its lowest level.

    Progress rather than a ratio, because a loss may be negative, and one near zero may grow tenfold for no reason. For
    every reading in the window before that was as high, one more in a row is needed.
    """

    kind, reads = "loss_divergence", "loss"
    severity = "error"
    readings_between = 50
    #: the lowest median of a window, and the standard deviation in it
    lowest, spread = math.inf, 0.0

    def judge(self, value: float, reading: Reading) -> Found | None:
        size = self.settings.divergence_window
        first, losses, high = self.window("first", _FIRST), self.window("losses", size), self.window("high", size)
        found = None
        if self._is_high(value):
            numbers = {"loss": value, "lowest": self.lowest, "first": median(first), "readings": len(high)}
            found = Found(value, numbers)
        if not full(first):
            first.append(value)
        losses.append(value)
        if full(losses) and (level := median(losses)) < self.lowest:
            self.lowest, self.spread = level, sigma(losses, level)
        return found

    def _is_high(self, loss: float) -> bool:
        """Whether enough readings in a row are high; ``high`` holds them."""
        first, losses, high = (self._windows[name] for name in ("first", "losses", "high"))
        rise = loss - self.lowest
        # nearly always, and cheap to check
        if rise <= 0 or rise <= self.settings.divergence_progress * (median(first) - self.lowest):
            high.clear()
            return False
        # the quietest stretch was quiet by chance, too
        far = self.settings.divergence_sigmas * max(self.spread, sigma(losses, median(losses)))
        if rise <= far / 2:
            high.clear()
            return False
        before = list(losses)[: max(0, len(losses) - len(high))]
        high.append(loss)
        enough = self.settings.divergence_patience + sum(other >= min(high) for other in before)
        return len(high) >= enough and sum(high) / len(high) - self.lowest > far


#: of a normal sample's median: sqrt(pi / 2) times that of its mean
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
#: half the distance between fp32 numbers, relatively: no weight moves by less
_FP32_ROUNDING = 2.0**-24
#: a learning rate that changes by more than this within the window is a schedule at work
_STEADY = 1.01


class LossPlateau(Rule):
    """Neither loss nor gradient norm fell within the window, for a reason other than convergence.

    An alert where nothing moves: gradients are zero though the loss is not, or the update ratio is next to nothing.
    Else a notice, where the loss has not fallen since the run began: noisy data that are nearly known look the same.
    """

    kind, reads = "loss_plateau", "loss"
    readings_between = 100
    #: the largest median update ratio of half a window
    peak = 0.0

    def judge(self, value: float, reading: Reading) -> Found | None:
        first = self.window("first", _FIRST)
        if not full(first):
            first.append(value)
        for name in ("loss", "grad_norm", "update_ratio", "lr"):
            window, number = self.window(name, self.settings.plateau_window), known(getattr(reading, name))
            window.extend([] if number is None else [number])
        losses, norms, ratios, rates = (self._windows[name] for name in ("loss", "grad_norm", "update_ratio", "lr"))
        if not full(losses):
            return None
        if full(ratios):
            self.peak = max(self.peak, median(parts(ratios, 2)[1]))
        start = median(first)
        why = self._why(start, losses, norms, ratios, rates)  # the cheapest check first
        if why is None:
            return None
        if full(norms):
            earlier, later = map(median, parts(norms, 2))
            if later < self.settings.plateau_falling * earlier:
                return None
        halves = parts(losses, 2)
        before, after = map(median, halves)
        errors = [
            sigma(half, level) / math.sqrt(len(half)) for half, level in zip(halves, (before, after), strict=True)
        ]
        if before - after > self.settings.plateau_sigmas * _MEDIAN_ERROR * math.hypot(*errors):
            return None
        numbers: dict[str, Any] = {str(name): median(window) for name, window in self._windows.items() if window}
        return Found(value, {**numbers, "window": len(losses)}, why)

    def _why(self, start: float, losses: Window, norms: Window, ratios: Window, rates: Window) -> str | None:
        level = median(losses)
        if level != 0 and full(norms) and norms[-1] == 0 and median(norms) == 0:
            return "zero gradients"
        least = max(_FP32_ROUNDING, self.settings.plateau_still * self.peak)
        still = full(ratios) and median(ratios) <= least
        if still and not (full(rates) and max(rates) > _STEADY * min(rates)):
            return "zero rate" if rates and rates[-1] == 0 else "still"
        rising = full(rates) and rates[-1] > _STEADY * rates[0]
        return None if rising or start - level >= self.settings.plateau_progress * abs(start) else "not fallen"


class LostUpdates(Rule):
    """Over a window, the larger part of the updates was rounded away."""

    kind, reads = "lost_updates", "lost_updates"

    def judge(self, value: float, reading: Reading) -> Found | None:
        shares = self.window("shares", self.settings.lost_window)
        shares.append(value)
        usual = median(shares)
        if not full(shares) or usual < self.settings.lost_share:
            return None
        rate = {} if reading.lr is None else {"lr": reading.lr}
        return Found(usual, {"lost_updates": usual, "readings": len(shares), **rate})


#: a loss scale below it makes gradients smaller than they are and cannot help (torch's scaler has no floor)
_USELESS = 1.0
_RECENT = 10
#: torch's initial scale; above it a scaler is still warming up to one that fits (DeepSpeed may start at 2**32)
_SEARCHING = 2.0**16


class ScaleCollapse(Rule):
    """Several of the last readings were skips at the scale's floor, or at a scale below one."""

    kind, reads = "scale_collapse", "loss_scale"
    severity = "error"

    def judge(self, value: float, reading: Reading) -> Found | None:
        low = reading.scale_at_floor or value < _USELESS
        skips = self.window("skips", _RECENT)
        skips.append(float(low and reading.skipped))
        count = int(sum(skips))
        if not low or count < self.settings.collapse_skips:
            return None
        return Found(value, {"loss_scale": value, "skipped_at_floor": count, "of_readings": len(skips)})


class SkipStreak(Rule):
    """More skips in a row than it takes to find a scale from 65,536 on; skips at higher scales are not counted."""

    kind, reads = "skip_streak", "skips_in_a_row"
    readings_between = 1
    #: how many of the skips in a row were made while the scale was still above
    scale_warmup = 0

    def judge(self, value: float, reading: Reading) -> Found | None:
        scale, skips = reading.loss_scale, reading.skips_in_a_row
        self.scale_warmup = skips if scale is not None and scale >= _SEARCHING else min(self.scale_warmup, skips)
        if skips - self.scale_warmup < self.settings.streak_skips:
            return None
        if scale is None:
            return Found(float(value), {"skips_in_a_row": skips}, "skips without a scale")
        return Found(float(value), {"skips_in_a_row": skips, "loss_scale": scale})


#: pieces of the window whose medians all have to rise
_PIECES = 8
#: noise orders them so once in 8! windows: the rise has to be this many of its standard deviations too
_NOISE = 2.0


class MemoryGrowth(Rule):
    """The median of every piece of the window lies above the one before, and the growth is large enough to matter."""

    kind, reads = "memory_growth", "memory_gib"

    def judge(self, value: float, reading: Reading) -> Found | None:
        if self.seen <= self.settings.memory_warmup:
            return None
        kept, steps = (self.window(name, self.settings.memory_window) for name in ("memory", "steps"))
        kept.append(value)
        steps.append(reading.step)
        if not full(kept) or value <= kept[0]:  # in most runs it does not grow, and the check is free
            return None
        pieces = parts(kept, _PIECES)
        levels = [median(piece) for piece in pieces]
        grown = levels[-1] - levels[0]
        spread = median([sigma(piece, level) for piece, level in zip(pieces, levels, strict=True)])
        worth = max(self.settings.memory_gib, self.settings.memory_ratio * levels[0], _NOISE * spread)
        if grown < worth or not all(before < after for before, after in pairwise(levels)):
            return None
        rate = 1000 * grown / (reading.step - int(steps[0]))
        return Found(value, {"memory_gib": value, "before": levels[0], "gib_per_1000_steps": rate})


#: an earlier reading counts as equally slow up to this many times the fastest of the slow readings in a row. Measured
#: on a machine with five times more work than cores: it separates nearly all chance from what lasts
_AS_SLOW = 2.0


class ThroughputDrop(Rule):
    """Several readings in a row far below the best level so far, which together have cost noticeable time.

    In tokens per second where they are known, else in samples per second. On a busy machine single steps are slow: for
    every reading in the window before that was as slow, one more in a row is needed.
    """

    kind = "throughput_drop"
    readings_between = 100
    #: the largest median of a window
    best = 0.0
    #: the slow readings in a row: how many, the fastest of them, and the seconds they have cost
    slow, fastest, lost = 0, 0.0, 0.0

    def conditions(self, reading: Reading) -> Iterable[tuple[Subject, Found | None]]:
        self.reads = "samples_per_s" if reading.tokens_per_s is None else "tokens_per_s"
        return super().conditions(reading)

    def judge(self, value: float, reading: Reading) -> Found | None:
        if self.seen <= self.settings.throughput_warmup:
            return None
        rates, settings, best = self.window("rates", self.settings.throughput_window), self.settings, self.best
        before = list(rates)[: len(rates) - self.slow]
        rates.append(value)
        if full(rates):
            self.best = max(best, median(rates))
        if value >= settings.throughput_ratio * best:
            self.slow, self.fastest, self.lost = 0, 0.0, 0.0
            return None
        self.slow, self.fastest = self.slow + 1, max(self.fastest, value)
        seconds = known(reading.seconds)
        # a time that is not known counts as long enough
        self.lost += settings.throughput_seconds if seconds is None else seconds * (1 - value / best)
        enough = settings.throughput_patience + sum(other <= _AS_SLOW * self.fastest for other in before)
        if self.slow < enough or self.lost < settings.throughput_seconds:
            return None
        return Found(value, {self.reads: value, "before": best, "ratio": value / best, "readings": self.slow})


class OperandRule(Rule):
    """One condition on each operand of each FP8 layer; the event names the layer and the operand."""

    def conditions(self, reading: Reading) -> Iterable[tuple[Subject, Found | None]]:
        for subject, operand in reading.fp8.items():
            if not (math.isfinite(operand.amax) and math.isfinite(operand.scale)):
                continue
            found = self.judge_operand(operand, subject)
            if found is not None:
                numbers = {"amax": operand.amax, "scale": operand.scale}
                found = found._replace(evidence={"role": subject[1], **found.evidence, **numbers})
            yield subject, found

    def judge_operand(self, operand: Operand, subject: Subject) -> Found | None:
        """Add the operand's numbers to the windows; the condition if it holds."""
        raise NotImplementedError


class FP8Underflow(OperandRule):
    """Several readings in a row, more of an operand's values were flushed to zero than training bears."""

    kind = "fp8_underflow"

    def judge_operand(self, operand: Operand, subject: Subject) -> Found | None:
        window = self.window(subject, self.settings.underflow_patience)
        window.append(operand.flushed)
        if not full(window) or min(window) < self.settings.underflow_share:
            return None
        return Found(operand.flushed, {"flushed": operand.flushed, "readings": len(window)})


class ScaleJump(OperandRule):
    """An operand's scale far from the median of the last ones."""

    kind = "scale_jump"

    def judge_operand(self, operand: Operand, subject: Subject) -> Found | None:
        window, power = self.window(subject, self.settings.jump_steps), math.log2(operand.scale)
        last = list(window)
        window.append(power)
        if len(last) < self.settings.jump_steps:
            return None
        before = median(last)
        # A gradient's scale rises without limit where a model has learned its data: that is no fault.
        far = before - power if subject[1] == "gradient" else abs(power - before)
        if far < max(math.log2(self.settings.jump_total), self.settings.jump_sigmas * sigma(last, before)):
            return None
        numbers = {"before": 2.0**before, "factor": 2.0 ** (power - before), "steps": len(window)}
        return Found(operand.scale, numbers, "scale fell" if power < before else "scale rose")


# ---------------------------------------------------------------------- all of them

#: in the order in which their events are reported
_RULES: tuple[type[Rule], ...] = (
    GradNormSpike,
    LossPlateau,
    LossDivergence,
    LostUpdates,
    ScaleCollapse,
    SkipStreak,
    ScaleJump,
    FP8Underflow,
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
        events = [rule.evaluate(reading, self.under_plan) for rule in self.rules if rule.kind in only]
        return [event for event in events if event is not None]

    def holds(self, kind: Kind) -> bool:
        """Whether the condition of a step's rule held in the last reading, though its event may have come before."""
        return any(rule.kind == kind and rule.cooldown.get(_STEP) == rule.readings_between for rule in self.rules)
