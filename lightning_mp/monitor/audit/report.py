"""What an audit found, one row per module: declared and observed dtypes, as text, markdown and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from textwrap import wrap
from typing import Any

from lightning_mp.errors import Faults
from lightning_mp.monitor.audit import table
from lightning_mp.monitor.audit.judge import Declaration, Difference, computed, differences, joined
from lightning_mp.monitor.audit.observer import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One module. Dtypes are short names (``"fp32"``), several where several were seen (``"bf16, fp32"``).

    ``None``: not observed, or in ``declared``, nothing was declared. ``compute`` is what its products, norms and
    look-ups ran in; ``differences`` say what is not as declared, where and why.
    """

    module: str
    declared: str | None
    param: str | None
    input: str | None
    output: str | None
    compute: str | None
    grad: str | None
    reduce: str | None
    optimizer_state: str | None
    ok: bool
    differences: tuple[Difference, ...] = ()
    #: ranks on which it differs, where that is not all of them
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "differences": [asdict(item) for item in self.differences], "ranks": list(self.ranks)}


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Declared against observed dtypes, a row for every module with parameters of its own.

    A module without any has a row where it multiplies in another dtype than declared. ``declared_by`` names the plan or
    the plugin, ``where`` step and device; ``notes`` say what could not be seen, and what a device cannot do.
    """

    rows: tuple[AuditRow, ...]
    declared_by: str
    where: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every module is as declared."""
        return all(row.ok for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: how many modules are as declared, by whom, and where that was seen."""
        wrong = sum(not row.ok for row in self.rows)
        count = f"{len(self.rows)} module{'' if len(self.rows) == 1 else 's'}"
        verdict = f"{count}, all as declared" if not wrong else f"{wrong} of {count} not as declared"
        return f"{verdict} by {self.declared_by}" + (f" ({self.where})" if self.where else "")

    def to_text(self, width: int = 110) -> str:
        """The table for a terminal of ``width`` characters; repeated layers that are alike share a line."""
        below = [*table.footnotes(self.rows), *(f"note: {note}" for note in self.notes)]
        folded = [line for text in below for line in wrap(text, width, subsequent_indent="  ")]
        return "\n".join([self.summary, *table.text(self.rows, width), *folded])

    def to_markdown(self) -> str:
        """The same as a markdown table, with what differs and the notes below it."""
        lines = [f"{self.summary}.", "", *table.markdown(self.rows)]
        wrong = self._faults()
        lines += ["", *(f"- {fault}" for fault in wrong.found)] if wrong.found else []
        below = [*(note.replace("* ", "\\* ", 1) for note in table.footnotes(self.rows)), *self.notes]
        lines += ["", *(f"> {note}" for note in below)] if below else []
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: what ``audit.json`` holds."""
        return {
            "ok": self.ok,
            "summary": self.summary,
            "declared_by": self.declared_by,
            "where": self.where,
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def raise_if_different(self) -> None:
        """Raise if any module differs.

        Raises:
            PlanError: every module that differs, with what was declared, what was found, why, and what to do.
        """
        self._faults().raise_if_any()

    def explanation(self) -> str:
        """Every module that differs, with what was declared, what was found, why, and what to do; else empty."""
        return "\n".join(f"  {number}. {fault}" for number, fault in enumerate(self._faults().found, start=1))

    def _faults(self) -> Faults:
        faults = Faults("PrecisionAudit")
        for names, row in _alike(self.rows):
            for difference in row.differences:
                where = f" on rank {', '.join(map(str, row.ranks))}" if row.ranks else ""
                faults.add(
                    f"{names} {_WITH[difference.what]} {difference.found}{where}",
                    f"{difference.declared}, as {self.declared_by} declares. Likely cause: {difference.reason}",
                    difference.fix,
                )
        return faults

    def __str__(self) -> str:
        return self.to_text()


_WITH = {
    "param": "with parameters stored in",
    "compute": "computed in",
    "grad": "with gradients in",
    "reduce": "with gradients summed across ranks in",
    "optimizer_state": "with optimizer state in",
}
#: up to so many names are written out one by one
_NAMES = 6


def _alike(rows: Sequence[AuditRow]) -> Iterator[tuple[str, AuditRow]]:
    """Differing rows, those that differ in the same way under one heading."""
    groups: dict[Any, list[AuditRow]] = {}
    for row in rows:
        if not row.ok:
            groups.setdefault((row.differences, row.ranks), []).append(row)
    for members in groups.values():
        names = [table.shown(row.module) for row in members]
        if len(names) > _NAMES:
            names = table.ranges([row.module for row in members])
        listed = ", ".join(names[: 2 * _NAMES]) + (
            f" and {len(names) - 2 * _NAMES} more" if len(names) > 2 * _NAMES else ""
        )
        yield listed if len(members) == 1 else f"{listed} ({len(members)} modules)", members[0]


def build(
    declaration: Declaration, ranks: Sequence[Mapping[str, Observed]], *, where: str = "", notes: Sequence[str] = ()
) -> AuditReport:
    """Judge what each rank saw; a module's row shows what all of them did."""
    rows: list[AuditRow] = []
    for name in ranks[0]:
        seen = [rank[name] for rank in ranks if name in rank]
        found = [tuple(differences(name, one, declaration)) for one in seen]
        wrong = tuple(rank for rank, one in enumerate(found) if one)
        if seen[0].param or wrong:
            rows.append(_row(name, seen, declaration, found, wrong if len(wrong) < len(ranks) else ()))
    hidden = sum(rank_seen.hidden and bool(rank_seen.param) for rank_seen in ranks[0].values())
    told = [*declaration.notes, *notes]
    if hidden:
        many = "1 module is" if hidden == 1 else f"{hidden} modules are"
        told.append(
            f"{many} in compiled or scripted regions: what runs there cannot be seen, nor what "
            "is multiplied outside of modules"
        )
    return AuditReport(tuple(rows), declaration.by, where, tuple(told))


def _row(
    name: str,
    seen: Sequence[Observed],
    declaration: Declaration,
    found: Sequence[tuple[Difference, ...]],
    ranks: tuple[int, ...],
) -> AuditRow:
    every = Observed(seen[0].class_name)
    for one in seen:
        every.add(one)
    return AuditRow(
        module=name,
        declared=declaration.declared(name),
        param=joined(every.param),
        input=joined(every.input),
        output=joined(every.output),
        compute=joined(computed(every)),
        grad=joined(every.grad),
        reduce=joined(every.reduce),
        optimizer_state=joined(every.state),
        ok=not any(found),
        differences=tuple(dict.fromkeys(difference for one in found for difference in one)),
        ranks=ranks,
    )
