"""Events of a run, such as a non-finite loss, as they are written to ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from lightning_mp.errors import is_whole, number
from lightning_mp.record.file_format import KEY, VERSION, is_step

Kind = Literal[
    "nonfinite_loss",
    "nonfinite_grad",
    "grad_norm_spike",
    "loss_plateau",
    "loss_divergence",
    "scale_collapse",
    "scale_jump",
    "skip_streak",
    "throughput_drop",
    "memory_growth",
]
Severity = Literal["info", "warning", "error"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One incident of a run. An event of the severity ``"info"`` is no alert, such as an overflow under loss scaling.

    ``step`` is the Trainer's ``global_step`` of the bad step. ``rank``, ``module`` and
    ``parameter`` are the source, or ``None`` if it is unknown or does not apply. ``value`` is the
    offending number, or ``None`` if it is not finite. ``evidence`` holds the numbers behind the
    verdict. ``action`` names the reaction, ``"log"`` if the event was only logged.
    """

    step: int
    kind: Kind
    severity: Severity
    rank: int | None = None
    module: str | None = None
    parameter: str | None = None
    value: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cause: str = ""
    advice: str = ""
    action: str = "log"
    #: the format version of the line in ``events.jsonl``
    format_version: int = VERSION

    @property
    def is_alert(self) -> bool:
        """True if the severity is ``"warning"`` or ``"error"``."""
        return self.severity != "info"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Event | None:
        """Return the event of a line of ``events.jsonl``; ``None`` if a field is missing or of another type.

        Keys that are no field of an event are left out: a newer package may write more.
        """
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        known.pop(KEY, None)
        texts = [known.get(name) for name in ("kind", "cause", "advice", "action") if name in known]
        names = [known.get("module"), known.get("parameter")]
        rank, value, evidence = known.get("rank"), known.get("value"), known.get("evidence", {})
        fits = (
            is_step(known.get("step"))
            and "kind" in known
            and known.get("severity") in SEVERITIES
            and all(isinstance(text, str) for text in texts)
            and all(name is None or isinstance(name, str) for name in names)
            and (rank is None or is_whole(rank))
            and (value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)))
            and isinstance(evidence, Mapping)
        )
        return cls(**known) if fits else None

    def to_dict(self) -> dict[str, Any]:
        """Return every field, as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        places = [f"rank {self.rank}"] if self.rank is not None else []
        places += [f"module {self.module!r}"] if self.module else []
        places += [f"parameter {self.parameter!r}"] if self.parameter else []
        where = f" in {', '.join(places)}" if places else ""
        pairs = ((key, number(value) if isinstance(value, float) else value) for key, value in self.evidence.items())
        numbers = ", ".join(f"{key} {value}" for key, value in pairs)
        text = f"step {self.step}: {self.kind.replace('_', ' ')}{where}"
        text += f" ({numbers})" if numbers else ""
        rest = {"Likely cause": self.cause, "What to do": self.advice}
        rest["Action taken"] = "" if self.action == "log" else self.action
        return ". ".join([text, *(f"{label}: {said}" for label, said in rest.items() if said)])
