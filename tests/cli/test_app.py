"""The command line: light to start, and one clear line where the input is bad."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app

HEAVY = ("torch", "lightning", "transformers", "tokenizers", "numpy", "matplotlib")


every_command = pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in app.registered_commands]
)


@every_command
def test_every_help_fits_a_hundred_columns_and_leaves_nothing_out(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"}).output
    assert max(map(len, said.splitlines())) <= 100
    assert "…" not in said


@every_command
def test_every_help_has_an_example(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert f"Example: lightning-mp {command}" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["train"], ["consolidate", "--help"], ["--version"]]
)
def test_nothing_heavy_is_imported_before_a_command_needs_it(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom lightning_mp.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        f"sys.stderr.write(' '.join(name for name in {HEAVY!r} if name in sys.modules) + '|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    )
    assert done.stderr.endswith("|")
    assert done.stderr.splitlines()[-1] == "|"


def test_a_shell_is_offered_completion() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lightning-mp"))],
        env={**os.environ, "_LIGHTNING_MP_COMPLETE": "complete_bash", "COMP_WORDS": "lightning-mp ad"}
        | {"COMP_CWORD": "1"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["advise"]
