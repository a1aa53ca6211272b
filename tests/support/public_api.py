"""The public names with their signatures, and the options of every command, as text.

``python -m support.public_api`` writes them to ``tests/public_api.txt``, which a test compares with the code.
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

SNAPSHOT = Path(__file__).parents[1] / "public_api.txt"
PACKAGES = ("lightning_mp", "lightning_mp.callbacks", "lightning_mp.numerics.loss_scale", "lightning_mp.planner")


def render() -> str:
    """Return one line for each public name, attribute, command and option."""
    lines = [line for package in PACKAGES for line in _names(package)]
    return "\n".join([*lines, *_commands(), ""])


def _names(package: str) -> Iterator[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None) or ["adjust", "init", "LossScaleState"]
    for name in sorted(names):
        yield from _describe(f"{package}.{name}", getattr(module, name))


def _describe(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield name
        return
    yield f"{name}{_signature(value)}"
    if isinstance(value, type):
        data = {field.name for field in fields(value)} if is_dataclass(value) else set[str]()
        for attribute, member in sorted(vars(value).items()):
            if attribute.startswith("_") or attribute in data:
                continue
            function = getattr(member, "__func__", member)
            yield f"{name}.{attribute}{_signature(function) if inspect.isfunction(function) else ''}"


def _signature(value: Any) -> str:
    """Return the parameters with their defaults; annotations differ between releases of Python."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "(...)"
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def _commands() -> Iterator[str]:
    from lightning_mp.cli import app

    group: Any = get_command(app)
    for name, command in sorted(group.commands.items()):
        for parameter in command.params:
            words = parameter.opts if isinstance(parameter, typer.core.TyperOption) else [parameter.name.upper()]
            yield f"lightning-mp {name} {' '.join(words)}"


if __name__ == "__main__":
    SNAPSHOT.write_text(render(), encoding="utf-8")
