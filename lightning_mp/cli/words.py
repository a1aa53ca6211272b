"""Let a word on the command line, such as ``plan=fp16``, override its section in a file or an experiment.

Hydra composes the word's option first, then the file's or the experiment's section on top of it.
So the option's values have to be put into the composed config once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.errors import Faults
from lightning_mp.policy.load import Places

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: the name of a config of one option alone
OPTION = "lightning_mp_option"
#: sections whose options all set the same key, such as trainer.max_epochs
_REPEATING = ("model", "data", "trainer")
#: sections whose options may differ in their keys
_DIFFERING = ("model", "data")
KeyPath = tuple[str, ...]
Values = Mapping[str, Any]
_ABSENT: Any = object()


@dataclass(frozen=True)
class Composer:
    """Composes configs with Hydra from the same search path."""

    #: the config to compose
    primary: str
    #: the part of the overrides that belongs to Hydra, its search path above all
    hydras_part: Sequence[str]
    #: the key of each other override, and the override
    lines: Sequence[tuple[str, str]]

    def whole(self) -> DictConfig:
        """Return the config with all overrides, and Hydra's own section in it."""
        return self._composed(self.primary, (line for _, line in self.lines))

    def option(self, group: str, choice: str | list[str]) -> dict[str, Any]:
        """Return the values of an option, or of several of a group, by themselves; interpolations are text."""
        from hydra.core.config_store import ConfigStore

        ConfigStore.instance().store(OPTION, {"defaults": [{group: choice}]})
        return plain_section(self._composed(OPTION, ()), group)

    def choice_without(self, group: str) -> Any:
        """Return the choice of ``group`` without the command line's; ``None`` if the config does not name the group.

        Raises:
            HydraException: the config leaves the choice open, as ``???``.
        """
        others = self._composed(self.primary, (line for key, line in self.lines if key != group))
        return others.hydra.runtime.choices.get(group)

    def _composed(self, name: str, lines: Iterable[str]) -> DictConfig:
        from hydra import compose
        from omegaconf import OmegaConf

        config = compose(name, [*self.hydras_part, *lines], return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        return config


def let_words_win(
    config: DictConfig,
    words: Sequence[Override],
    typed: set[KeyPath],
    composer: Composer,
    places: Places,
    faults: Faults,
) -> None:
    """Set each section of ``config`` that a word on the command line names to the word's option.

    ``typed`` are the paths of further keys that the command line sets: their values are kept.
    ``places`` is given the keys that the command line set. A ``null`` word sets the section to
    ``None``. In the sections model and data, a fault is added for a key that belongs to the file's
    option and is missing in the word's option.

    Raises:
        HydraException: an option does not compose.
    """
    for word in words:
        group = word.key_or_group
        value: Any = None if word.is_delete() else word.value()
        if value is None:
            config[group] = None
            continue
        option: dict[str, Any] = value if isinstance(value, dict) else composer.option(group, _choice(value))
        replaced: dict[str, Any] | None = {} if isinstance(value, dict) else _replaced(composer, group, _choice(value))
        composed = plain_section(config, group)
        below = {path[1:] for path in typed if path[0] == group}
        values = with_word(composed, option, replaced if replaced is None or group in _REPEATING else {}, below)
        for path in leaves(values):
            if at(composed, path) != at(values, path):
                places[".".join((group, *path))] = "on the command line"
        for path in stale(values, option, replaced or {}, below) if group in _DIFFERING else ():
            key = ".".join((group, *path))
            where = f" ({places[key]})" if key in places else ""
            problem = f"{word.input_line} next to {key}{where}, which that choice does not have"
            faults.add(problem, fix=f"remove it, or write ~{key} on the command line too")
        config[group] = values


def _choice(value: Any) -> Any:
    """Return an option's name as text, or a list of names unchanged.

    Hydra parses ``plan=16`` as a number, which names a plan by its precision.
    """
    return value if isinstance(value, list) else str(value)


def _replaced(composer: Composer, group: str, choice: Any) -> dict[str, Any] | None:
    """Return the values of the option that ``choice`` replaces, or ``None`` if it replaces none.

    The dict is empty if the config leaves the choice open, or chooses the same.
    """
    from hydra.errors import HydraException

    try:
        before = composer.choice_without(group)
    except HydraException:
        return {}
    if before is None:
        return None
    return {} if before == choice else composer.option(group, before)


def plain_section(config: DictConfig, section: str) -> dict[str, Any]:
    """Return a section as plain values, with interpolations as text; an empty dict if it is not there."""
    from omegaconf import OmegaConf

    whole = cast("dict[str, Any]", OmegaConf.to_container(config))
    values = whole.get(section)
    return cast("dict[str, Any]", values) if isinstance(values, dict) else {}


def typed_paths(parsed: Iterable[Override]) -> set[KeyPath]:
    """Return the path of each key that ``parsed`` sets or removes; for a mapping the paths of its values."""
    paths: set[KeyPath] = set()
    for override in parsed:
        whole = override.is_delete() or override.is_sweep_override()
        value: Any = None if whole else override.value()
        paths.update(leaves(value, tuple(override.key_or_group.split("."))))
    return paths


def leaves(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Return the paths of all values below ``value``; a mapping without entries is a value."""
    if not isinstance(value, Mapping) or not value:
        return [path]
    items = cast("Values", value).items()
    return [leaf for key, item in items for leaf in leaves(item, (*path, str(key)))]


def at(values: Any, path: KeyPath) -> Any:
    """Return the value at ``path`` in ``values``, or :data:`_ABSENT`."""
    for key in path:
        values = cast("Values", values).get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    return values


def with_word(composed: Values, option: Values, replaced: Values | None, typed: Iterable[KeyPath]) -> dict[str, Any]:
    """Return the section ``composed`` with the values of ``option``, which a word on the command line names.

    ``replaced`` are the values of the option that the config chooses without the word. A value that both options have
    stays as composed: ``trainer=cpu`` is about the accelerator, and leaves a file its ``max_steps``. With
    ``replaced=None`` the config chooses none, and the section is ``option`` alone. It also is if ``option`` is empty,
    or names another ``_target_`` than the section. Values at the paths ``typed`` are kept.
    """
    if replaced is None or not option or _builds_another(composed, option):
        values = _copied(option)
    else:
        values = _merged(composed, option, replaced)
    for path in typed:
        target = values
        for key in path[:-1]:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = cast("dict[str, Any]", target[key])
        value = at(composed, path)
        if value is _ABSENT:
            target.pop(path[-1], None)
        else:
            target[path[-1]] = value
    return values


def stale(values: Values, option: Values, replaced: Values, typed: Iterable[KeyPath]) -> list[KeyPath]:
    """Return the paths in ``values`` that the option ``replaced`` has and ``option`` does not."""
    return [
        path
        for path in leaves(values)
        if at(replaced, path) is not _ABSENT and at(option, path) is _ABSENT and path not in typed
    ]


def _merged(composed: Values, option: Values, replaced: Values) -> dict[str, Any]:
    """Return ``composed`` with the values of ``option`` that ``replaced`` does not have.

    Mappings are merged key by key, unless each has another ``_target_``.
    """
    merged = _copied(composed)
    for key, value in option.items():
        before = replaced.get(key, _ABSENT)
        if before == value:
            continue
        present = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(present, dict)
        if nested and not _builds_another(cast("Values", present), cast("Values", value)):
            below = cast("Values", before) if isinstance(before, Mapping) else {}
            merged[key] = _merged(cast("Values", present), cast("Values", value), below)
        else:
            merged[key] = value
    return merged


def _builds_another(values: Values, option: Values) -> bool:
    """True if both have a ``_target_``, and it is not the same class or function."""
    names = [str(each.get("_target_", "")).rpartition(".")[2] for each in (values, option)]
    return all(names) and names[0] != names[1]


def _copied(values: Values) -> dict[str, Any]:
    return {key: _copied(cast("Values", value)) if isinstance(value, dict) else value for key, value in values.items()}
