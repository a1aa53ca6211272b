"""The file that a run is described by, completed: what it leaves open comes from this package's groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from lightning_mp.errors import Faults, nearest, one_line
from lightning_mp.policy import precision_word
from lightning_mp.policy.presets import PRESETS

SEARCHPATH = "pkg://lightning_mp.configs"
#: the sections of a training file, and which file of its group a section comes from that is not there
SECTIONS: Mapping[str, str | None] = {
    "plan": None,
    "model": None,
    "data": None,
    "strategy": "auto",
    "trainer": "default",
    "callbacks": "default",
}
#: settings of the run beside its sections
SETTINGS: Mapping[str, Any] = {"seed": 0, "ckpt_path": None, "run_dir": None}
EXPERIMENT = "experiment"
#: Hydra's groups for what this command does itself: where a run writes, and what logs
_OURS: Mapping[str, str | None] = {"hydra/output": None, "hydra/job_logging": "none", "hydra/hydra_logging": "none"}


def shipped_root() -> Path:
    """The file that is meant where none is named."""
    return Path(str(files("lightning_mp.configs"))) / "train.yaml"


@dataclass(frozen=True, slots=True)
class Primary:
    """A root config: its own keys, its defaults list, and where its groups are looked for."""

    path: Path
    body: Mapping[str, Any]
    defaults: tuple[Any, ...]
    searchpath: tuple[str, ...]
    #: sections that are written out in the file, and hence chosen from no group
    written: frozenset[str] = field(default_factory=frozenset[str])

    def node(self, chosen: Collection[str]) -> dict[str, Any]:
        """What Hydra composes. ``chosen`` are groups that the command line chooses from: they replace what is written.

        An entry of the defaults list that the command line changes has to be there, so one of ``null`` is.
        """
        own, overrides = list(self.defaults), list[Any]()
        while own and "override" in _entry(own[-1])[1]:
            overrides.insert(0, own.pop())
        overrides = [entry for entry in overrides if _entry(entry)[0] not in _OURS]
        overrides += [{f"override {name}": option} for name, option in _OURS.items() if name not in chosen]
        named = {_entry(entry)[0] for entry in own}
        added = [
            {name: None if name in self.written else option} for name, option in SECTIONS.items() if name not in named
        ]
        own = [*own, *([] if "_self_" in own else ["_self_"]), *([] if EXPERIMENT in named else [{EXPERIMENT: None}])]
        dropped = {name for name in chosen if name in self.written and name not in named}
        body = {key: value for key, value in self.body.items() if key not in dropped}
        hydra = {**cast("dict[str, Any]", body.pop("hydra", None) or {}), "searchpath": list(self.searchpath)}
        return {"defaults": [*added, *own, *overrides], "hydra": hydra, **SETTINGS, **body}

    def choices(self) -> list[tuple[str, Any, bool]]:
        """Of the file's own defaults list: each group, what is chosen from it, and whether that may be missing."""
        return [
            (_entry(entry)[0], option, "optional" in _entry(entry)[1])
            for entry in self.defaults
            if isinstance(entry, dict)
            for option in cast("dict[str, Any]", entry).values()
        ]


def read(path: Path, config_dirs: Collection[Path], faults: Faults) -> Primary | None:
    """Read ``path``; ``None`` where it cannot be, with a fault."""
    from omegaconf import OmegaConf

    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.y*ml")]) if path.parent.is_dir() else ""
        near = repr(str(path / "config.yaml")) if (path / "config.yaml").is_file() else near
        fix = f"did you mean {near}?" if near else "check the path, or leave it out and write experiment=NAME"
        faults.add(f"config {str(path)!r}, which is no file", "a YAML file", fix)
        return None
    body = mapping(str(path), lambda: OmegaConf.to_container(OmegaConf.load(path), resolve=False), faults)
    if body is None:
        return None
    defaults = body.pop("defaults", None) or []
    if not isinstance(defaults, list):
        faults.add(f"{path}: defaults: {defaults!r}", "a list", "write '- plan: fp16' below it")
        return None
    plan: Any = body.get("plan")
    if isinstance(plan, str) and plan in PRESETS and precision_word(plan) is None:  # as plan=a100 is
        del body["plan"]
        defaults = [{"plan": plan}, *(entry for entry in cast("list[Any]", defaults) if _entry(entry)[0] != "plan")]
    theirs: Any = (body.get("hydra") or {}).get("searchpath") or []
    folders = [folder.resolve().as_uri() for folder in config_dirs]
    searchpath = tuple(dict.fromkeys([*theirs, *folders, SEARCHPATH]))
    written = frozenset(name for name in SECTIONS if name in body)
    return Primary(path.resolve(), body, tuple(cast("list[Any]", defaults)), searchpath, written)


def mapping(name: str, load: Callable[[], Any], faults: Faults) -> dict[str, Any] | None:
    """What ``load`` makes of the file ``name``, if that is a mapping; else ``None``, with a fault."""
    try:
        loaded = load()
    except Exception as error:  # those of PyYAML, OmegaConf and the file system share no base class
        faults.add(f"config {name!r}: {one_line(error)}", "a YAML mapping", "fix the file")
        return None
    if isinstance(loaded, Mapping):
        return dict(cast("Mapping[str, Any]", loaded))
    faults.add(f"config {name!r}, a {type(loaded).__name__}", "a YAML mapping", "write 'plan:' and 'model:'")
    return None


def _entry(entry: Any) -> tuple[str, list[str]]:
    """The group an entry of a defaults list chooses from (or the config it names), and the words before it."""
    name = str(next(iter(cast("dict[str, Any]", entry)), "")) if isinstance(entry, dict) else str(entry)
    *words, name = name.split() or [""]
    return name.lstrip("/"), words
