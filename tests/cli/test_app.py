"""The command line: light to start, and one clear line where the input is bad."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app

HEAVY = ("torch", "lightning", "transformers", "tokenizers", "numpy", "matplotlib")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
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


# ------------------------------------------------------------------ consolidate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models import Regression
    from support.running import fit
    from support.saving import SaveAt

    class WithExtraState(Regression):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    folder = tmp_path_factory.mktemp("run")
    fit(WithExtraState(), callbacks=[SaveAt(folder, 8)])
    return folder / "8.ckpt"


def test_consolidate_writes_and_says_what(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "net.safetensors"
    result = _run("consolidate", str(checkpoint), str(out), "--dtype", "bfloat16", "--prefix", "net.")
    assert result.exit_code == 0
    size = sum(one.nbytes for one in load_file(out).values())
    assert result.output == f"{out}: 6 tensors, {size / 1024:.1f} KiB, bf16\n"
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]


def test_consolidate_casts_what_was_pinned_only_where_all_is_asked_for(tmp_path: Path) -> None:
    from lightning_mp import MixedPrecisionPlan
    from support.models import Regression
    from support.running import fit
    from support.saving import SaveAt

    plan = MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"})
    fit(Regression(), callbacks=[SaveAt(tmp_path, 8)], plugins=[plan])
    for options, dtypes in {(): "bf16, fp32", ("--all",): "bf16"}.items():
        arguments = [str(tmp_path / "8.ckpt"), str(tmp_path / "w.pt"), "--dtype", "bf16"]
        assert _run("consolidate", *arguments, *options).output.endswith(f" KiB, {dtypes}\n")


def test_consolidate_reads_objects_only_with_trust(tmp_path: Path) -> None:
    from fractions import Fraction

    import torch

    torch.save({"state_dict": {"a": torch.zeros(2)}, "hyper_parameters": Fraction(1, 2)}, tmp_path / "x.ckpt")
    arguments = ["consolidate", str(tmp_path / "x.ckpt"), str(tmp_path / "w.pt")]
    refused = _run(*arguments)
    assert refused.exit_code == 2
    assert "--trust" in refused.stderr
    assert _run(*arguments, "--trust").exit_code == 0
