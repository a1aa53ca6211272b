"""A hook of mkdocs: the command line from the commands as they are, the Python API from lists of names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

_NAMES = re.compile(r"<!-- api(?P<bare> without members)?: (?P<names>[^>]*?) -->", re.DOTALL)
_MARK = "<!-- commands: docs/_build/commands.py writes them here -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands, and the names of the API, where a page has their marks."""
    if _MARK in markdown:
        markdown = markdown.replace(_MARK, "\n".join(_commands()))
    return _NAMES.sub(_documented, markdown)


def _documented(found: re.Match[str]) -> str:
    options = "\n    options:\n      members: []" if found["bare"] else ""
    return "\n\n".join(f"::: lightning_mp.{name}{options}" for name in found["names"].split())


def _commands() -> Iterator[str]:
    from lightning_mp.cli import app

    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        about, _, example = (command.help or "").partition("Example:")
        yield f"## lightning-mp {name}\n\n{about.strip()}\n"
        if example:
            yield f"```bash\n{' '.join(example.split())}\n```\n"
        options = [_option(parameter) for parameter in command.params]
        if options:
            yield "| option | |\n| --- | --- |\n" + "\n".join(options) + "\n"


def _option(parameter: Any) -> str:
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    meaning = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.default if parameter.default not in (None, False) else None
    return f"| `{names}` | {meaning} |" if default in (None, "") else f"| `{names}` | {meaning} Default: {default}. |"
