"""From a file and arguments to the config of each run."""

import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import lightning_mp.configs
from lightning_mp.cli import config as composing
from lightning_mp.cli.train import run
from lightning_mp.errors import Faults
from support.training import PLAIN, write


def one(path: str | None, *overrides: str, dirs: tuple[Path, ...] = ()) -> Any:
    faults = Faults("test")
    with composing.composed(overrides if path is None else (path, *overrides), "train", faults, dirs) as (config, _):
        faults.raise_if_any()
        return OmegaConf.create(config)


CONFIGS = Path(lightning_mp.configs.__file__).parent
GROUPS = "defaults:\n  - plan: fp32\n  - model: llama_tiny\n  - data: library_text\n  - _self_\n"
EXPERIMENT = "# @package _global_\ndefaults:\n  - override /plan: fp16\nseed: 5\n"
SCALED = PLAIN.replace("bf16-mixed", "16-mixed\n  loss_scaling: {init_scale: 8}")
WORD = PLAIN.replace("plan:\n  precision: bf16-mixed", "plan: %s")
LIST = "plan.pins=[{pattern:'ln_*',dtype:fp32}]"
TARGET = "lightning_mp.MixedPrecisionPlan"
#: a file (or none), arguments, and what then stands at some keys; None is nothing
COMPOSED: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    "nothing": (
        None,
        "",
        {"plan.precision": "auto", "strategy.name": "auto", "model.architecture": "llama", "seed": 0},
    ),
    "a plain file is completed": (PLAIN, "", {"plan": {"precision": "bf16-mixed"}, "strategy.name": "auto", "seed": 0}),
    "with callbacks": (PLAIN, "", {"callbacks.training_health._target_": "lightning_mp.callbacks.TrainingHealth"}),
    "a choice replaces": (SCALED, "plan=bf16", {"plan": {"_target_": TARGET, "precision": "bf16-mixed"}}),
    "a file with a defaults list is Hydra's": (
        f"{GROUPS}plan: {{tf32: high}}\n",
        "plan=bf16",
        {"plan": {"_target_": TARGET, "precision": "bf16-mixed", "tf32": "high"}},
    ),
    "what is taken may be set where a defaults list lacks it": (
        GROUPS,
        "run_dir=x trainer.max_steps=3 plan.tf32=high",
        {"trainer": {"max_steps": 3}, "plan.tf32": "high", "run_dir": "x"},
    ),
    "a defaults list that begins with the package's": (
        "defaults: [/lightning_mp, _self_, {override /plan: fp16}]\nseed: 5\n",
        "callbacks=none",
        {"plan.precision": "16-mixed", "seed": 5, "callbacks": {}},
    ),
    "a plan by its precision over an experiment": (
        None,
        "experiment=gpt2_small plan=bf16-true",
        {"plan.precision": "bf16-true", "plan.checkpointing": "*.h.*"},
    ),
    "a word of the file is a choice": (PLAIN + "callbacks: none\n", "", {"callbacks": {}}),
    "a plan by its precision": (SCALED, "plan=bf16-true", {"plan": {"precision": "bf16-true"}}),
    "a section left out": (PLAIN, "callbacks=null", {"callbacks": None}),
    "a field of a word": (WORD % 16, "plan.tf32=high", {"plan": {"precision": 16, "tf32": "high"}}),
    "a preset in the file": (WORD % "a100", "", {"plan.precision": "bf16-mixed", "plan.tf32": "high"}),
    "a strategy by its name in a Trainer": (None, "strategy=mp_fsdp2", {"strategy": {"name": "mp_fsdp2"}}),
    "a strategy of the package's": (None, "strategy=ddp", {"strategy": {"name": "ddp"}}),
    "a key that is removed": (PLAIN, "~trainer.logger", {"trainer.logger": None, "trainer.devices": 1}),
    **{
        f"a value: {text}": (PLAIN + "ours: 1\n", text, {text.partition("=")[0]: value})
        for text, value in {
            "trainer.max_steps=7": 7, "trainer.gradient_clip_val=0.5": 0.5, "plan.tf32=high": "high",
            "plan.loss_scaling.init_scale=8": 8, "plan.pins.lm_head=fp32": "fp32", "model.lr=0.2": 0.2,
            "strategy.find_unused_parameters=true": True, "callbacks.training_health.every_n_steps=2": 2, "ours=2": 2,
            "+more=3": None, "run_dir=x": "x",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_file_groups_and_arguments_are_one_config(name: str, tmp_path: Path) -> None:
    text, arguments, expected = COMPOSED[name]
    config = one(None if text is None else write(tmp_path, text), *arguments.split())
    for key, value in expected.items():
        assert OmegaConf.select(config, key) == value, key


def test_the_file_may_stand_anywhere_and_its_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN, "plan=fp16/config.yaml")
    assert one(path, "seed=3").seed == 3
    with composing.composed(["plan=fp16", path, "seed=3"], "train", Faults("test")) as (config, places):
        assert (config["plan"]["precision"], config["seed"]) == ("16-mixed", 3)
        assert places["model.width"].startswith("config.yaml:")


def test_a_projects_own_groups_stand_next_to_those_of_the_package(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [fp16]\nloss_scaling: {init_scale: 8}\n", "plan/ours.yaml")
    config = one(write(tmp_path, GROUPS.replace("fp32", "ours")))
    assert (config.plan.precision, config.plan.loss_scaling.init_scale) == ("16-mixed", 8)
    write(tmp_path / "mine", EXPERIMENT, "experiment/one.yaml")
    config = one(None, "experiment=one", dirs=(tmp_path / "mine",))
    assert (config.plan.precision, config.seed) == ("16-mixed", 5)


def test_the_command_line_has_the_last_word_over_an_experiment_and_that_over_the_file(tmp_path: Path) -> None:
    write(tmp_path, EXPERIMENT, "experiment/one.yaml")
    path = write(tmp_path, f"{GROUPS}  - experiment: null\nseed: 1\n")
    found = [one(path, *words.split()) for words in ("", "experiment=one", "experiment=one plan=bf16 seed=6")]
    precisions = ["32-true", "16-mixed", "bf16-mixed"]
    assert [(each.plan.precision, each.seed) for each in found] == list(zip(precisions, (1, 5, 6), strict=True))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("plan=fp32,bf16", [("plan=fp32",), ("plan=bf16",)]),
        ("plan=glob(bf16*)", [("plan=bf16",), ("plan=bf16_true",)]),
        ("+extra=1,2", [("+extra=1",), ("+extra=2",)]),
    ],
)
def test_a_sweep_is_a_run_a_value(argument: str, expected: list[tuple[str, ...]]) -> None:
    given, runs = composing.sweep(["seed=1", argument, "trainer.max_steps=8,9"], Faults("test"))
    assert given == ["seed=1"]
    steps = ("trainer.max_steps=8", "trainer.max_steps=9")
    assert runs == [[*chosen, each] for chosen in expected for each in steps]


def test_hydra_is_left_as_it_was(tmp_path: Path) -> None:
    before = set(ConfigStore.instance().repo)
    one(write(tmp_path, PLAIN), "plan=bf16-true")
    assert not GlobalHydra.instance().is_initialized()
    assert set(ConfigStore.instance().repo) == before


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
def test_hydras_folder_is_the_runs(given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(composing.time, "strftime", lambda _: "TIME")
    config = checked(write(tmp_path, PLAIN + "out: ${hydra:runtime.output_dir}\njob: ${hydra:job.name}\n"), given)
    assert (config["job"], config["out"]) == ("run", str(tmp_path / expected))
    assert Path(config["run_dir"]).absolute() == tmp_path / expected
    assert not HydraConfig.initialized()
