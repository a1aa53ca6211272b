"""From a file and arguments to the config of each run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_mp.cli import config as composing
from lightning_mp.cli.config import Composed
from lightning_mp.cli.train import run
from lightning_mp.errors import Faults
from support.training import PLAIN, write


def composed(path: str | None, *overrides: str, dirs: tuple[Path, ...] = (), multirun: bool = False) -> list[Composed]:
    faults = Faults("test")
    given = overrides if path is None else (path, *overrides)
    with composing.composed(given, "train", faults, dirs, multirun=multirun) as found:
        faults.raise_if_any()
        return found


def one(path: str | None, *overrides: str, dirs: tuple[Path, ...] = ()) -> Any:
    (found,) = composed(path, *overrides, dirs=dirs)
    return found.config


def test_without_a_file_every_section_comes_from_its_group() -> None:
    config = one(None)
    assert set(config) == {
        "plan", "model", "data", "strategy", "trainer", "callbacks", "seed", "ckpt_path", "run_dir",
    }  # fmt: skip
    assert (config.plan.precision, config.strategy.name, config.model.architecture) == ("auto", "auto", "llama")


def test_a_plain_file_is_completed_with_strategy_callbacks_and_settings(tmp_path: Path) -> None:
    config = one(write(tmp_path, PLAIN))
    assert config.plan == {"precision": "bf16-mixed"}
    assert config.strategy.name == "auto"
    assert "training_health" in config.callbacks
    assert "default_root_dir" not in config.trainer
    assert (config.seed, config.ckpt_path, config.run_dir[:9]) == (0, None, "runs/run-")


def test_a_choice_replaces_what_the_file_writes_out(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN.replace("bf16-mixed", "16-mixed\n  loss_scaling: {init_scale: 8}"))
    config = one(path, "plan=bf16")
    assert config.plan == {"_target_": "lightning_mp.MixedPrecisionPlan", "precision": "bf16-mixed"}


@pytest.mark.parametrize("written", ["{precision: 16-mixed, loss_scaling: {init_scale: 8}}", "fp32", None])
def test_a_plan_may_be_chosen_by_its_precision(written: str | None, tmp_path: Path) -> None:
    path = None if written is None else write(tmp_path, PLAIN.replace("\n  precision: bf16-mixed", f" {written}"))
    assert one(path, "plan=bf16-true").plan == {"precision": "bf16-true"}


@pytest.mark.parametrize("section", ["callbacks", "trainer"])
def test_a_section_may_be_left_out(section: str, tmp_path: Path) -> None:
    assert section not in one(None, f"{section}=null")
    assert section not in one(write(tmp_path, PLAIN), f"{section}=null")


def test_a_value_may_be_given_for_what_is_there_and_for_what_may_be(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN + "ours: 1\n")
    changes = {
        "trainer.max_steps=7": 7,
        "trainer.gradient_clip_val=0.5": 0.5,
        "plan.tf32=high": "high",
        "plan.loss_scaling.init_scale=8": 8,
        "plan.pins=[{pattern:'*norm*',dtype:fp32}]": [{"pattern": "*norm*", "dtype": "fp32"}],
        "model.lr=0.2": 0.2,
        "strategy.find_unused_parameters=true": True,
        "callbacks.training_health.every_n_steps=2": 2,
        "ours=2": 2,
        "run_dir=x": "x",
    }
    config = one(path, *changes)
    for text, expected in changes.items():
        assert OmegaConf.select(config, text.partition("=")[0]) == expected, text


@pytest.mark.parametrize("change", ["plan.tf32=high", "+plan.tf32=high"])
def test_a_field_of_a_plan_that_is_a_word_is_added_to_it(tmp_path: Path, change: str) -> None:
    path = write(tmp_path, "plan: 16\ndefaults:\n  - model: llama_tiny\n  - data: library_text\n")
    assert one(path, change).plan == {"precision": "16-mixed", "tf32": "high"}


def test_a_preset_in_the_file_is_what_it_is_on_the_command_line(tmp_path: Path) -> None:
    groups = "defaults:\n  - plan: fp32\n  - model: llama_tiny\n  - data: library_text\n"
    path = write(tmp_path, f"plan: a100\n{groups}")
    assert one(path).plan == one(None, "plan=a100").plan
    assert one(path, "plan.tf32=highest").plan.tf32 == "highest"
    assert one(path, "plan=v100").plan.precision == "16-mixed"


def test_a_strategy_may_be_chosen_by_its_name_in_a_trainer() -> None:
    assert one(None, "strategy=mp_fsdp2").strategy.name == "fsdp2"


def test_a_list_of_pins_replaces_a_mapping_of_them() -> None:
    config = one(None, "plan=longspec", "plan.pins=[{pattern:'ln_*',dtype:fp32}]")
    assert config.plan.pins == [{"pattern": "ln_*", "dtype": "fp32"}]
    assert config.plan.tf32 == "high"


def test_a_projects_own_groups_stand_beside_those_of_the_package(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [fp16]\nloss_scaling: {init_scale: 8}\n", "plan/ours.yaml")
    path = write(tmp_path, "defaults:\n  - plan: ours\n  - model: gpt2_tiny\n  - data: library_text\n")
    config = one(path)
    assert (config.plan.precision, config.plan.loss_scaling.init_scale) == ("16-mixed", 8)
    assert config.trainer.devices == 1


def test_a_folder_of_groups_may_be_named(tmp_path: Path) -> None:
    experiment = "# @package _global_\ndefaults:\n  - override /plan: fp16\nseed: 5\n"
    write(tmp_path / "mine", experiment, "experiment/one.yaml")
    config = one(None, "experiment=one", dirs=(tmp_path / "mine",))
    assert (config.plan.precision, config.seed) == ("16-mixed", 5)


def test_a_root_of_ones_own_takes_an_experiment_and_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    write(tmp_path, "# @package _global_\ndefaults:\n  - override /plan: fp16\nseed: 5\n", "experiment/one.yaml")
    path = write(
        tmp_path, "defaults:\n  - plan: fp32\n  - model: llama_tiny\n  - data: library_text\n  - _self_\nseed: 1\n"
    )
    assert one(path).seed == 1
    config = one(path, "experiment=one")
    assert (config.plan.precision, config.seed) == ("16-mixed", 5)
    config = one(path, "experiment=one", "plan=bf16", "seed=6")
    assert (config.plan.precision, config.seed) == ("bf16-mixed", 6)


def test_an_experiment_is_a_config_of_its_own_too(tmp_path: Path) -> None:
    path = write(tmp_path, "# @package _global_\ndefaults:\n  - override /plan: fp16\n  - override /model: gpt2_tiny\n")
    config = one(path, "data=library_text")
    assert (config.plan.precision, config.model.architecture) == ("16-mixed", "gpt2")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("plan=fp32,bf16", [("plan=fp32",), ("plan=bf16",)]),
        ("seed=range(0,3)", [("seed=0",), ("seed=1",), ("seed=2",)]),
        ("plan=glob(bf16*)", [("plan=bf16",), ("plan=bf16_true",)]),
        ("+extra=1,2", [("+extra=1",), ("+extra=2",)]),
    ],
)
def test_a_sweep_is_a_run_a_value(argument: str, expected: list[tuple[str, ...]]) -> None:
    assert [job.swept for job in composed(None, argument, multirun=True)] == expected


def test_sweeps_multiply() -> None:
    jobs = composed(None, "plan=fp32,bf16", "seed=1,2", "trainer.max_steps=9", multirun=True)
    found = [(job.config.plan.precision, job.config.seed, job.config.trainer.max_steps) for job in jobs]
    assert found == [("32-true", 1, 9), ("32-true", 2, 9), ("bf16-mixed", 1, 9), ("bf16-mixed", 2, 9)]


def test_hydra_is_left_as_it_was(tmp_path: Path) -> None:
    before = set(ConfigStore.instance().repo)
    one(write(tmp_path, PLAIN), "plan=bf16")
    assert not GlobalHydra.instance().is_initialized()
    assert set(ConfigStore.instance().repo) == before


# ---------------------------------------------------------------------- a project of Hydra's own making

#: train.yaml of lightning-hydra-template, with a plan in it, and the groups that it chooses from
TEMPLATE = {
    "train.yaml": """
# @package _global_
defaults:
  - _self_
  - plan: bf16
  - data: plain
  - model: plain
  - callbacks: default
  - logger: null
  - trainer: default
  - paths: default
  - hydra: default
  - experiment: null
  - optional local: default
  - debug: null
task_name: "train"
tags: ["dev"]
ckpt_path: null
seed: null
""",
    "data/plain.yaml": "_target_: support.training.loader\nrows: 12\n",
    "model/plain.yaml": "_target_: support.training.Net\nwidth: 4\n",
    "callbacks/default.yaml": """
checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: ${paths.output_dir}/checkpoints
""",
    "trainer/default.yaml": "default_root_dir: ${paths.output_dir}\naccelerator: cpu\ndevices: 1\nmax_steps: 2\n",
    "paths/default.yaml": """
root_dir: ${oc.env:PROJECT_ROOT}
log_dir: ${paths.root_dir}/logs/
output_dir: ${hydra:runtime.output_dir}
work_dir: ${hydra:runtime.cwd}
""",
    "hydra/default.yaml": """
defaults:
  - override hydra_logging: colorlog
  - override job_logging: colorlog
run:
  dir: ${paths.log_dir}/${task_name}/runs/${now:%Y}
job_logging:
  handlers:
    file:
      filename: ${hydra.runtime.output_dir}/${task_name}.log
""",
    "debug/default.yaml": "# @package _global_\ntask_name: debug\n",
}


def template(folder: Path) -> str:
    for name, text in TEMPLATE.items():
        write(folder, text, name)
    return str(folder / "train.yaml")


def checked(*arguments: str) -> dict[str, Any]:
    """What would run, resolved and without a fault."""
    said: list[str] = []
    assert run(arguments, said.append, only_show=True) == 0
    return OmegaConf.to_container(OmegaConf.create("\n".join(said)))  # pyright: ignore[reportReturnType]


def test_the_template_most_projects_begin_with_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choices that need not be there, its logging that is not installed, and the folder it writes to."""
    monkeypatch.setenv("PROJECT_ROOT", str(tmp_path))
    path, home = template(tmp_path), f"{tmp_path}/logs/train/runs/{time.strftime('%Y')}"
    config = checked(path)
    assert Path(config["run_dir"]) == Path(config["paths"]["output_dir"]) == Path(home)
    assert Path(config["callbacks"]["checkpoint"]["dirpath"]) == Path(home, "checkpoints")
    assert config["paths"]["work_dir"] == str(Path.cwd())
    assert checked(path, "debug=default")["run_dir"].endswith("/debug/runs/" + time.strftime("%Y"))
    write(tmp_path, "# @package _global_\nseed: 7\n", "local/default.yaml")
    assert checked(path)["seed"] == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("run_dir=here", "here"),
        ("run_dir='${hydra:runtime.output_dir}/more'", "runs/run-TIME/more"),
        ("hydra.run.dir=there", "there"),
    ],
)
def test_hydras_output_folder_is_that_of_the_run(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(composing.time, "strftime", lambda _: "TIME")
    config = checked(write(tmp_path, PLAIN + "out: ${hydra:runtime.output_dir}\njob: ${hydra:job.name}\n"), given)
    assert (config["job"], config["out"]) == ("run", str(tmp_path / expected))
    assert Path(config["run_dir"]).absolute() == tmp_path / expected
    assert not HydraConfig.initialized()
