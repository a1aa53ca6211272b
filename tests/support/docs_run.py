"""Runs a page: its Python in one namespace, its files and commands in one folder."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lightning_mp.cli import app
from support import docs_check
from support.docs import Block, commands, sides
from support.docs_setup import Setup

PROJECT = Path(__file__).parent / "docs_project"


class PageRun:
    """One page in the present folder; ``all_commands`` runs those too that take long."""

    def __init__(self, page: str, setup: Setup, *, all_commands: bool) -> None:
        self.page, self.setup, self.all_commands = page, setup, all_commands
        self.namespace: dict[str, Any] = {"__name__": "page"}
        self.printed = ""
        for source in PROJECT.iterdir():
            if source.suffix == ".py":
                shutil.copy(source, source.name)
        if setup.prepare is not None:
            self.namespace |= setup.prepare() or {}

    def block(self, block: Block) -> None:
        """Do with one block what is done with its kind."""
        code = block.code
        for old, new in self.setup.changes.items():
            code = code.replace(old, new)
        if block.file is not None:
            path = Path(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
        if block.language == "json":
            Path("ds.json").write_text(code, encoding="utf-8")
        getattr(self, f"_{block.language}")(block, code)

    # ------------------------------------------------------------------ kinds

    def _python(self, block: Block, code: str) -> None:
        if block.file is not None:
            compile(code, block.place, "exec")  # a command of the page runs it
            return
        with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a page shows what stock hosts warn about
            exec(compile(code, block.place, "exec"), self.namespace)
        self.printed = printed.getvalue()

    def _diff(self, block: Block, _: str) -> None:
        old, new = sides(block)
        compile(old, f"{block.place} (-)", "exec")
        self._python(block, new)

    def _text(self, block: Block, code: str) -> None:
        docs_check.shown(code, self.printed, block.place, loose=self.setup.loose)

    def _yaml(self, block: Block, code: str) -> None:
        docs_check.yaml_file(code, block)

    def _json(self, block: Block, code: str) -> None:
        docs_check.json_file(code, block)

    def _bash(self, block: Block, code: str) -> None:
        self.printed = ""
        for words in commands(Block(block.page, block.line, block.language, code)):
            self._command(words, block)

    # ------------------------------------------------------------------ commands

    def _command(self, words: Sequence[str], block: Block) -> None:
        program, *arguments = words
        if program == "lightning-mp":
            self._lightning_mp(arguments, block)
        elif program == "python" and arguments[0].endswith(".py"):
            self._script(arguments, block)
        elif program in docs_check.HARMLESS:
            done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, (block.place, done.stderr)
            self.printed += done.stdout
        else:
            docs_check.command(program, arguments, block)

    def _lightning_mp(self, arguments: list[str], block: Block) -> None:
        docs_check.options_exist(arguments, block)
        line = " ".join(arguments)
        extra = [text for start, texts in self.setup.shorter.items() if line.startswith(start) for text in texts]
        training = arguments[0] == "train" and not {"--help", "--show"} & set(arguments)
        if _any(self.setup.elsewhere, line) or (_any(self.setup.slow, line) and not self.all_commands):
            if not training:
                return
            extra = ["--show"]  # composed and checked, for every run of a sweep
        elif training:
            extra = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", *extra]
        status, output = (_started if self.all_commands else _called)([*arguments, *extra])
        expected = next((status for start, status in self.setup.status.items() if line.startswith(start)), 0)
        assert status == expected, (block.place, line, status, output)
        self.printed += output

    def _script(self, arguments: list[str], block: Block) -> None:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, (block.place, done.stderr)
        self.printed += done.stdout


def _called(arguments: list[str]) -> tuple[int, str]:
    """``lightning-mp`` in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, arguments)
    return result.exit_code, f"{result.output}{'' if result.exception is None else repr(result.exception)}"


def _started(arguments: list[str]) -> tuple[int, str]:
    """``lightning-mp`` as it is typed: it may start processes of its own."""
    command = [str(Path(sys.executable).with_name("lightning-mp")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stdout + done.stderr


def _any(patterns: Sequence[str], line: str) -> bool:
    return any(re.match(pattern, line) for pattern in patterns)
