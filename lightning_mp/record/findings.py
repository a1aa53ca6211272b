"""The doctor's findings with their stable codes, and their output as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_mp.record.events import Severity

if TYPE_CHECKING:
    from rich.console import Console

_EXIT = {"info": 0, "warning": 1, "error": 2}
_COLOURS = {"info": "cyan", "warning": "yellow", "error": "bold red"}
#: name -> code; a code is never reused
CODES: dict[str, str] = {
    "no_fp32_masters": "LMP001",
    "fp16_params_under_scaler": "LMP002",
    "eval_mode": "LMP003",
    "lora_checkpoint_no_input_grads": "LMP004",
    "use_cache_while_checkpointing": "LMP005",
    "bf16_emulated": "LMP006",
    "tf32_off": "LMP007",
    "dims_not_aligned": "LMP008",
    "tied_weights_conflicting_pins": "LMP009",
    "norm_in_half": "LMP010",
    "eps_underflows": "LMP011",
    "scale_overflows_at_once": "LMP012",
    "accumulation_overflows": "LMP013",
    "schedule_counts_skips": "LMP014",
    "deepspeed_contradicts_trainer": "LMP015",
    "precision_refused": "LMP022",
    "positions_rounded": "LMP024",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the doctor: the problem, its effect, and the change to make.

    ``where`` is a module's name or a configuration key, or ``None`` for the whole run.
    """

    name: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str | None = None

    @property
    def code(self) -> str:
        """The stable code, such as ``"LMP012"``."""
        return CODES[self.name]

    def to_dict(self) -> dict[str, Any]:
        """Return every field and the code, as plain values."""
        return {"code": self.code, **asdict(self)}

    def __str__(self) -> str:
        where = f" [{self.where}]" if self.where else ""
        return f"{self.code} {self.severity}{where}: {self.what}. Why: {self.why}. Fix: {self.fix}"


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 2 if there is an error, else 1 if there is a warning, else 0."""
    return max((_EXIT[finding.severity] for finding in findings), default=0)


def to_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON array with an object for each."""
    return json.dumps([finding.to_dict() for finding in findings], indent=2, ensure_ascii=False)


def show(findings: Sequence[Finding], console: Console, rules: int) -> None:
    """Print the findings in their order, and a last line with ``rules``, the number of rules, and the counts."""
    from rich.padding import Padding
    from rich.text import Text

    for finding in findings:
        head = f"{finding.code} {finding.severity} {finding.name}" + (f"  {finding.where}" if finding.where else "")
        console.print(head, style=_COLOURS[finding.severity], markup=False, highlight=False)
        text = f"what: {finding.what}\nwhy: {finding.why}\nfix: {finding.fix}"
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    counts = [f"{sum(f.severity == severity for f in findings)} {severity}" for severity in reversed(_EXIT)]
    said = f"{len(findings)} found: {', '.join(counts)}" if findings else "nothing found"
    console.print(f"{rules} rules, {said}", highlight=False)
