"""Every example runs as its docstring says, and what it prints is true."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mp import doctor
from support.examples import FILES, FOLDER, Ran, code_of, handed_to_fit, load, path_of, run, warned

#: what each is started with here, where it is not run as it is
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "04": ("hydra/job_logging=none", "hydra/hydra_logging=none"),
    "05": ("fit", "--config", str(FOLDER / "05_lightning_cli.yaml")),
}


Example = Callable[..., Ran]


@pytest.fixture
def example(tmp_path: Path, pytestconfig: pytest.Config) -> Example:
    """Runs an example, by its number and with arguments, in the test's own folder; it warns of nothing."""

    def ran(number: str, *arguments: str) -> Ran:
        found = run(number, tmp_path, *arguments)
        assert warned(found, pytestconfig.getini("filterwarnings")) == []
        return found

    return ran


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- all of them


def test_there_are_ten() -> None:
    assert sorted({path.name[:2] for path in FILES}) == [f"{number:02}" for number in range(1, 11)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short_and_opens_with_how_to_run_it(path: Path) -> None:
    docstring, code = code_of(path)
    summary, command = docstring.splitlines()[0::2][:2]
    assert summary
    assert command.split()[:2] == ["python", f"examples/{path.name}"]
    assert len(path.read_text().splitlines()) <= 60
    assert 'if __name__ == "__main__":' in code


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_in_the_readme(path: Path) -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| {path.name[:2]} |")]
    assert len(rows) == 1
    assert f"`python examples/{path.name}" in rows[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_doctor_finds_no_error_in_what_an_example_trains(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        trainer, model, batch = handed_to_fit(path, ARGUMENTS.get(path.name[:2], ()), patch)
    arguments = {"accelerator": "cpu", "gradient_clip_val": trainer.gradient_clip_val}
    found = doctor(model, trainer.precision_plugin, trainer.strategy, arguments, batch=batch)
    assert [finding for finding in found if finding.severity == "error"] == []


# ---------------------------------------------------------------------- 01


def test_01_shows_pinned_modules_in_fp32_and_the_rest_in_bf16(example: Example) -> None:
    ran = example("01")
    assert float(ran.find(r"validation loss ([\d.]+)")[0]) < math.log(512) - 1
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in ran.output.splitlines() if "| `" in line]
    assert len(rows) == 12
    for name, declared, param, _, output, compute, grad, _, state, ok in rows:
        pinned = "norm" in name or name.endswith("lm_head")
        if pinned:
            assert (declared, output, compute) == ("fp32", "fp32", "fp32")
        elif "embed" in name:  # a look-up
            assert (declared, output, compute) == ("bf16 (autocast)", "fp32", "fp32*")
        else:
            assert (declared, output, compute) == ("bf16", "bf16", "bf16")
        assert (param, grad, state, ok) == ("fp32", "fp32", "fp32", "yes")


# ---------------------------------------------------------------------- 02


def test_02_shows_the_true_diff() -> None:
    _, before = code_of(path_of("02_fp16_before"))
    docstring, after = code_of(path_of("02_fp16_after"))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    changed = [line for line in lines if not line.startswith("@@") and line != "+"]
    assert [line[4:] for line in docstring.splitlines() if re.match(r" {4}[+-]", line)] == changed
    assert len(changed) == 5


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run("02_fp16_after", tmp_path_factory.mktemp("after"))


@pytest.mark.slow
def test_02_runs_in_fp16_and_leaves_a_report(after: Ran, pytestconfig: pytest.Config) -> None:
    assert warned(after, pytestconfig.getini("filterwarnings")) == []
    loss = float(after.find(r"train loss ([\d.]+)")[0])
    assert loss < 0.5 * math.log(256)
    (report,) = re.findall(r"^report: (.*)$", after.errors, re.MULTILINE)
    folder = Path(report).parent
    assert folder == after.folder / "runs" / "next_byte" / "version_0"
    assert "<html" in Path(report).read_text()[:500]
    audit = json.loads((folder / "audit.json").read_text())
    assert audit["ok"]
    assert {row["module"]: row["compute"] for row in audit["rows"]}["network.2"] == "fp16"
    readings = lines_of(folder / "metrics.jsonl")
    assert [reading["step"] for reading in readings] == list(range(200))
    assert all(math.log2(reading["health/loss_scale"]).is_integer() for reading in readings)
    assert readings[-1]["train/loss"] == pytest.approx(loss, abs=0.006)


@pytest.mark.slow
def test_02_learns_as_much_as_it_did_before(after: Ran, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    before = run("02_fp16_before", tmp_path)
    (said,) = warned(before, pytestconfig.getini("filterwarnings"))
    assert "fp16 is not supported on CPU" in said  # stock Lightning's, of its own 16-mixed
    losses = [float(ran.find(r"train loss ([\d.]+)")[0]) for ran in (before, after)]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)


# ---------------------------------------------------------------------- 03


@pytest.mark.gloo
@pytest.mark.slow
def test_03_holds_half_on_each_process_and_trains_as_one_device(example: Example) -> None:
    ran = example("03")
    held = dict.fromkeys(range(2), 0)
    for rank, part, whole, share in re.findall(
        r"rank (\d) holds ([\d,]+) of ([\d,]+) parameters, ([\d.]+)%", ran.output
    ):
        held[int(rank)], size = int(part.replace(",", "")), int(whole.replace(",", ""))
        assert float(share) == pytest.approx(50, abs=2)
        assert size == sum(parameter.numel() for parameter in load("03").Llama().parameters())
    assert sum(held.values()) == size
    two, one, apart = map(float, ran.find(r"loss after 40 steps: ([\d.]+) on two, ([\d.]+) on one; (\S+) apart"))
    assert apart < 5e-3
    assert abs(two - one) <= apart + 1e-4
    assert one < math.log(256) - 1.5


# ---------------------------------------------------------------------- 04


@pytest.mark.slow
def test_04_takes_overrides_and_sweeps(example: Example) -> None:
    overrides = ("trainer.max_steps=30", "+trainer.enable_progress_bar=false", "data.val_batches=2")
    ran = example("04", "-m", "plan=fp32,careful", "model=gpt2_tiny", *overrides)
    found = re.findall(
        r"(\S+): validation loss ([\d.]+) after (\d+) steps, loss scale (\S+), report in (.*)", ran.output
    )
    assert [(precision, steps, scale) for precision, _, steps, scale, _ in found] == [
        ("32-true", "30", "none"),
        ("16-mixed", "30", "2048.0"),
    ]
    losses = [float(loss) for _, loss, *_ in found]
    assert max(losses) < math.log(512) - 0.5
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert len({folder for *_, folder in found}) == 2
    for *_, folder in found:
        assert Path(folder).is_relative_to(ran.folder / "multirun")
        assert len(lines_of(Path(folder) / "lightning_mp_run" / "metrics.jsonl")) == 30


# ---------------------------------------------------------------------- 05


@pytest.mark.slow
def test_05_runs_its_file_with_an_option_over_it(example: Example) -> None:
    ran = example("05", *ARGUMENTS["05"], "--trainer.limit_train_batches", "60")
    loss, applied, skipped = ran.find(r"16-mixed: validation loss ([\d.]+); (\d+) steps, (\d+) skipped")
    assert float(loss) < math.log(512) - 1
    assert (int(applied), int(skipped)) == (60, 0)
    folder = ran.folder / ran.find(r"config, metrics and audit: (.*)")[0]
    audit = json.loads((folder / "audit.json").read_text())
    assert audit["ok"]
    computed = {row["module"]: row["compute"] for row in audit["rows"]}
    assert (computed["head"], computed["encoder.layers.0.linear1"]) == ("fp32", "fp16")
    assert len(lines_of(folder / "metrics.jsonl")) == 60 + 1
    assert "limit_train_batches: 60" in (folder / "config.yaml").read_text()


# ---------------------------------------------------------------------- 07


@pytest.mark.slow
def test_07_learns_with_two_optimizers_and_one_scale(example: Example) -> None:
    ran = example("07")
    before, after = (
        tuple(map(int, ran.find(rf"{when}: (\d+)% of 4,000 samples on a spot, (\d) of 8")))
        for when in ("before", "after")
    )
    assert before[0] < 10
    assert after[0] > 60
    assert (before[1], after[1]) == (0, 8)
    norm, scale = map(float, ran.find(r"median gradient norm ([\d.]+), loss scale (\d+)"))
    assert 0.1 < norm < 10  # not times the scale
    assert math.log2(scale).is_integer()
    assert 2**10 <= scale <= 2**20
    applied, skipped = map(int, ran.find(r"optimizer steps: (\d+) applied, (\d+) skipped"))
    assert applied + skipped == 2 * 8 * 64  # two optimizers, eight epochs of 64 batches
    assert 0 < skipped < 100


# ---------------------------------------------------------------------- 08


@pytest.mark.slow
def test_08_skips_exactly_the_batches_without_a_comment(example: Example) -> None:
    ran = example("08")
    batches = list(load("08").batches())
    empty = [index for index, (_, targets) in enumerate(batches) if bool((targets[:, 1:] == -100).all())]
    assert 0 < len(empty) < len(batches) / 2
    skipped, steps, found = ran.find(r"guard: (\d+) of (\d+) steps skipped, batches (\[.*\]) have no comment")
    assert json.loads(found) == empty
    assert (int(skipped), int(steps)) == (len(empty), len(batches))
    assert "audit: 14 modules, all as declared by MixedPrecision('bf16-mixed')" in ran.output
    first, last = map(float, ran.find(r"health: loss ([\d.]+) at first, ([\d.]+) at last"))
    assert last < first / 2
    readings = lines_of(ran.folder / "lightning_mp_run" / "metrics.jsonl")
    assert [reading["step"] for reading in readings if reading["train/loss"] is None] == empty
    audit = json.loads((ran.folder / "lightning_mp_run" / "audit.json").read_text())
    computed = {row["module"]: row["compute"] for row in audit["rows"]}
    assert (computed["encoder.layers.0.norm1"], computed["encoder.layers.0.linear1"]) == ("fp32", "bf16")


# ---------------------------------------------------------------------- 09


@pytest.mark.slow
def test_09_shows_fp8_beside_bf16(example: Example) -> None:
    ran = example("09")
    bf16, fp8 = (float(loss) for loss in re.findall(r"validation loss ([\d.]+)", ran.output))
    assert fp8 == pytest.approx(bf16, rel=0.02)
    assert fp8 < math.log(512) - 0.5
    layers = re.findall(r"^model\.\S+ +\(.*\) +(\w+)$", ran.output, re.MULTILINE)
    assert layers.count("fp8") == 14
    assert layers.count("skip") == 1
    audited = [line for line in ran.output.splitlines() if "| `" in line]
    assert sum("| fp8 | fp32 |" in line for line in audited) == 7  # a row for both layers


# ---------------------------------------------------------------------- 10


@pytest.mark.gloo
@pytest.mark.slow
def test_10_holds_half_of_the_layers_on_each_process_and_ends_as_one(example: Example) -> None:
    ran = example("10")
    held = set(re.findall(r"rank (\d) holds (\S+) to (\S+)", ran.output))
    layer = "model.model.layers"
    assert held == {
        ("0", "model.model.embed_tokens.weight", f"{layer}.1.post_attention_layernorm.weight"),
        ("1", f"{layer}.2.self_attn.q_proj.weight", "model.lm_head.weight"),
    }
    loss, apart = ran.find(r"loss after 40 steps: ([\d.]+); weights (\S+) apart")
    assert float(loss) < math.log(256) - 1.5
    assert float(apart) == 0.0
