"""``lightning-mp train`` trains, goes on, sweeps, and leaves what is needed to do it again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from typer.testing import CliRunner

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.cli import app
from lightning_mp.cli.train import show_readings
from support.running import trainer
from support.training import PLAIN, QUICK, Net, loader, losses, readings, run, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def config(folder: str | Path) -> dict[str, Any]:
    return yaml.safe_load((Path(folder) / "config.yaml").read_text())


def test_the_bar_shows_the_loss_and_the_scale(tmp_path: Path) -> None:
    health = TrainingHealth(run_dir=tmp_path)
    plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(init_scale=64.0))
    fitted = trainer(plugins=[plan], callbacks=[health, RichProgressBar()], max_steps=2, enable_progress_bar=True)
    show_readings(fitted)
    module = Net(4)
    fitted.fit(module, loader(12))
    bar = fitted.progress_bar_callback
    assert bar is not None
    shown = bar.get_metrics(fitted, module)
    assert (shown["scale"], shown["loss"]) == ("64", f"{health.rows[-1]['train/loss']:.4g}")


@pytest.mark.parametrize("plan", ["longspec", "bf16_true", "auto"])
def test_a_plan_of_the_package_trains_the_default_model(plan: str) -> None:
    run(f"plan={plan}", "run_dir=out", *QUICK)
    found = losses("out")
    assert len(found) == 3
    assert all(4 < loss < 8 for loss in found)  # random weights over 512 tokens: ln 512 = 6.2


SMALL = {
    "neox_wide": (
        "model.config.hidden_size=48", "model.config.intermediate_size=64", "model.config.num_attention_heads=3",
        "trainer.max_steps=2", "trainer.limit_val_batches=1",
    ),
    "gpt2_small": (
        "data.context=64", "data.vocab=512", "data.batch_size=2", "data.num_workers=0", "model.config.n_layer=1",
        "model.config.vocab_size=512", "model.config.n_embd=48", "trainer.max_steps=2", "trainer.limit_val_batches=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_of_the_package_runs_with_only_its_size_changed(name: str) -> None:
    run(f"experiment={name}", *QUICK[1:], "trainer.accelerator=cpu", "run_dir=out", *SMALL[name])
    assert len(losses("out")) == 2


def _process() -> tuple[list[str], dict[str, str]]:
    return list(sys.path), {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "PYTEST_"))}


def test_any_module_trains_as_it_would_without_the_command_which_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = _process()
    run(write(tmp_path, PLAIN), "run_dir=out")
    assert _process() == before
    data = instantiate(yaml.safe_load(PLAIN)["data"])
    seed_everything(0, workers=True, verbose=False)
    module = instantiate(yaml.safe_load(PLAIN)["model"])
    trainer(plugins=[MixedPrecisionPlan("bf16-mixed")], max_steps=3).fit(module, data)
    kept = torch.load(Path("out") / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(kept[name], value) for name, value in module.state_dict().items())


def test_the_resolved_config_is_beside_the_run_and_runs_again(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("width: 4", "width: ${four}") + "four: 4\n")
    run(path, "run_dir=out", "model.lr=0.3")
    saved = config("out")
    assert (saved["model"]["lr"], saved["run_dir"]) == (0.3, "out")
    assert "${" not in (Path("out") / "config.yaml").read_text()
    run("out/config.yaml", "run_dir=again")
    assert losses("again") == losses("out")


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    run(path, "run_dir=whole", "trainer.max_steps=-1", "trainer.max_epochs=2")
    run(path, "run_dir=out", "trainer.max_steps=-1", "trainer.max_epochs=1")
    first, last = (Path("out") / "config.yaml").read_bytes(), "out/checkpoints/last.ckpt"
    run("out/config.yaml", "trainer.max_epochs=2", f"ckpt_path={last}")
    assert [row["step"] for row in readings("out")] == [0, 1, 2, 3, 4, 5]
    assert losses("out") == losses("whole")
    run("out/config.yaml", "trainer.max_epochs=3", f"ckpt_path={last}")
    assert (Path("out") / "config.yaml").read_bytes() == first
    resumed = [yaml.safe_load((Path("out") / f"config_{number}.yaml").read_text()) for number in (2, 3)]
    assert [(one["ckpt_path"], one["trainer"]["max_epochs"]) for one in resumed] == [(last, 2), (last, 3)]


def test_a_run_ends_with_what_happened_in_words(tmp_path: Path) -> None:
    scaled = PLAIN.replace("bf16-mixed", "16-mixed\n  loss_scaling: {init_scale: 1.0e+30}")
    *_, said = run(write(tmp_path, scaled), "run_dir=out", "trainer.max_steps=2")
    assert said == "out: 2 steps, 2 of them skipped; report: out/report.html"
    nothing = CliRunner().invoke(app, ["train", write(tmp_path, scaled), "run_dir=none", "trainer.max_steps=6"])
    assert nothing.exit_code == 1
    assert "The run applied 0 of its 6 optimizer steps" in nothing.output


@pytest.mark.parametrize(
    "plan",
    [
        "bf16-true",
        "{_target_: lightning_mp.MixedPrecisionPlan.preset, name: bf16_true}",
        "{_target_: support.training.TruePlan}",
    ],
)
def test_a_plan_may_be_a_precision_or_a_call(plan: str, tmp_path: Path) -> None:
    run(write(tmp_path, PLAIN.replace("plan:\n  precision: bf16-mixed", f"plan: {plan}")), "run_dir=out")
    kept = torch.load(Path("out") / "checkpoints" / "last.ckpt", weights_only=True)
    name = "TruePlan" if "TruePlan" in plan else "MixedPrecisionPlan"
    assert kept[name]["policy"]["precision"] == "bf16-true"


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-m", "lightning_mp", "train", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.slow
def test_a_run_of_a_sweep_that_fails_leaves_the_others_and_their_report(tmp_path: Path) -> None:
    done = command("-m", write(tmp_path, PLAIN), "plan=fp16", "model.width=3,4", "run_dir=sweep", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 of 2 runs failed" in done.stdout
    assert "mat1 and mat2" in done.stderr
    ran = tmp_path / "sweep" / "model.width=4"
    assert config(ran)["plan"]["precision"] == "16-mixed"
    assert len(losses(ran)) == 3
    assert ran.name in (tmp_path / "sweep" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.gloo
def test_two_processes_train_one_run(tmp_path: Path) -> None:
    arguments = ("strategy=ddp", "trainer.devices=2")
    done = command(write(tmp_path, PLAIN), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(losses(folder)) == 3
