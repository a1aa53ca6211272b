"""The command line: light to start, and one clear line where the input is bad."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import lightning_mp
from lightning_mp.cli import app
from lightning_mp.cli.output import refusals

HEAVY = ("torch", "lightning", "transformers", "tokenizers", "numpy", "matplotlib")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _refusal(tmp_path: Path, *arguments: str) -> str:
    """The one line of a refused demo, which must leave nothing behind."""
    out = tmp_path / "out"
    result = _run("demo", "--out", str(out), *arguments)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("lightning-mp demo: Got ") or " needs " in lines[0]
    assert ". Allowed: " in lines[0] or ". Install it: " in lines[0]
    assert not out.exists()
    return lines[0]


def test_help_names_the_demo_and_its_options() -> None:
    assert "demo" in _run("--help").output
    text = _run("demo", "--help").output
    for option in ("--text", "--modes", "--steps", "--out"):
        assert option in text


def test_no_arguments_show_the_help() -> None:
    assert "Usage" in _run().output


def test_train_without_arguments_shows_how_it_is_used() -> None:
    result = _run("train")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "lightning-mp train experiment=llama_tiny" in result.output


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_every_help_has_an_example(command: str) -> None:
    assert f"Example: lightning-mp {command}" in " ".join(_run(command, "--help").output.split())


def test_the_version_is_printed() -> None:
    result = _run("--version")
    assert result.exit_code == 0
    assert result.output == f"lightning-mp {lightning_mp.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["consolidate", "--help"], ["--version"], ["demo", "--modes", "fp99"]]
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


def test_an_unknown_mode_lists_the_known_and_the_nearest(tmp_path: Path) -> None:
    line = _refusal(tmp_path, "--modes", "fp32,BF16,fb16-ckpt")
    assert "'BF16', 'fb16-ckpt'" in line
    assert "fp32, tf32, fp16, bf16, bf16-ckpt" in line
    assert "Did you mean 'bf16', 'bf16-ckpt'?" in line


def test_no_mode_at_all_is_refused(tmp_path: Path) -> None:
    assert "names no mode" in _refusal(tmp_path, "--modes", " , ")


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_fewer_than_one_step_is_refused(tmp_path: Path, steps: str) -> None:
    assert f"--steps {steps}. Allowed: an integer >= 1" in _refusal(tmp_path, "--steps", steps)


def test_steps_that_are_no_number_are_refused() -> None:
    result = _run("demo", "--steps", "many")
    assert result.exit_code == 2
    assert "--steps" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "which does not exist" in _refusal(tmp_path, "--text", str(tmp_path / "missing"))


def test_a_binary_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(bytes(range(256)))
    assert "not readable as UTF-8 text" in _refusal(tmp_path, "--text", str(tmp_path / "photo.jpg"))


def test_a_text_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "note.txt").write_text("hello world")
    result = _run("demo", "--out", str(tmp_path / "out"), "--text", str(tmp_path / "note.txt"))
    assert result.exit_code == 2
    assert "at least" in result.stderr
    assert "tokens" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = _run("demo", "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(("package", "extra"), [("transformers", "hf"), ("tokenizers", "hf"), ("matplotlib", "report")])
def test_a_missing_package_names_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say: not importable
    line = _refusal(tmp_path, "--steps", "1")
    assert f"needs {package}. " in line
    assert f"lightning-mp[{extra}]" in line


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
    assert result.output == f"{out}: 6 tensors, {out.stat().st_size / 1024:.1f} KiB, bf16\n"
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]


def test_consolidate_says_what_it_left_out(checkpoint: Path, tmp_path: Path) -> None:
    result = _run("consolidate", str(checkpoint), str(tmp_path / "w.pt"))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'w.pt'}: 6 tensors, ")
    assert result.stderr == "left out, since they are no tensors: _extra_state\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{missing}", "{out}"], "which does not exist"),
        (["{checkpoint}", "{out}", "--dtype", "fp9"], "Got dtype='fp9'. Allowed: fp32, bf16, fp16"),
        (["{checkpoint}", "{out}", "--prefix", "model."], "Got the prefix 'model.'"),
        (["{checkpoint}", "{out}x"], "a name ending in .pt, .pth, .bin, .ckpt, .safetensors"),
        (["{checkpoint}", "{checkpoint}/w.pt"], "exists"),
    ],
)
def test_a_refused_consolidate_is_one_line(checkpoint: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    names = {"checkpoint": checkpoint, "missing": tmp_path / "missing.ckpt", "out": tmp_path / "w.pt"}
    result = _run("consolidate", *(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("lightning-mp consolidate: ")
    assert says in line
    assert not list(tmp_path.iterdir())


def test_consolidate_reads_objects_only_with_trust(tmp_path: Path) -> None:
    from fractions import Fraction

    import torch

    torch.save({"state_dict": {"a": torch.zeros(2)}, "hyper_parameters": Fraction(1, 2)}, tmp_path / "x.ckpt")
    arguments = ["consolidate", str(tmp_path / "x.ckpt"), str(tmp_path / "w.pt")]
    refused = _run(*arguments)
    assert refused.exit_code == 2
    assert "--trust" in refused.stderr
    assert _run(*arguments, "--trust").exit_code == 0


def test_a_reader_who_has_enough_is_no_refusal() -> None:
    with pytest.raises(BrokenPipeError), refusals("advise"):
        raise BrokenPipeError
