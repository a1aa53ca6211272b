"""A word on the command line, ``plan=fp16``, wins over the sections of a file with a defaults list, or is refused."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from lightning_mp.cli import app
from lightning_mp.cli import config as composing
from lightning_mp.cli.files import shipped
from lightning_mp.errors import Faults
from support.training import write

FILE = """defaults:
  - plan: auto
  - strategy: fsdp2
  - model: llama_tiny
  - data: library_text
  - trainer: gpu
  - callbacks: health
  - _self_
plan:
  precision: bf16-mixed
  pins:
    lm_head: fp32
strategy:
  wrap: LlamaDecoderLayer
callbacks:
  training_health:
    every_n_steps: 5
  mine: {_target_: lightning.pytorch.callbacks.Timer}
trainer:
  devices: 8
  max_steps: 7
model:
  config:
    hidden_size: 32
  lr: 0.5
"""
SET = "on the command line"


def section(name: str, path: str | None, *words: str) -> tuple[Any, list[str], dict[str, str]]:
    """A section, the faults, and the places of keys."""
    faults = Faults("test")
    with composing.composed([*([] if path is None else [path]), *words], "train", faults) as (config, places):
        return config.get(name), [str(fault) for fault in faults.found], dict(places)


ARCHITECTURE = {"architecture": "gpt2", "lr": 0.5}
#: the words, a section, and what then stands at some of its keys; None is nothing
WON: dict[str, tuple[str, dict[str, Any]]] = {
    "plan=fp16": ("plan", {"precision": "16-mixed", "pins": {"lm_head": "fp32"}}),
    "plan=bf16-true": ("plan", {"precision": "bf16-true", "pins": {"lm_head": "fp32"}}),
    "plan=16": ("plan", {"precision": 16}),
    "plan=auto": ("plan", {"precision": "auto"}),
    "plan=a100": ("plan", {"precision": "bf16-mixed", "tf32": "high"}),
    "plan=fp16 plan.precision=bf16-true": ("plan", {"precision": "bf16-true"}),
    "plan=longspec plan.pins.lm_head=fp16": ("plan", {"pins": {"*norm*": "fp32", "lm_head": "fp16"}}),
    "plan={precision:fp16}": ("plan", {"precision": "fp16"}),
    "strategy=fsdp2_offload": ("strategy", {"name": "fsdp2_offload", "wrap": "LlamaDecoderLayer"}),
    "strategy=mp_ddp ~strategy.wrap": ("strategy", {"name": "mp_ddp", "wrap": None}),
    "trainer=cpu": ("trainer", {"accelerator": "cpu", "devices": 1, "max_steps": 7}),
    "trainer=debug": ("trainer", {"accelerator": "cpu", "max_steps": 3, "enable_checkpointing": False}),
    "trainer=gpu": ("trainer", {"accelerator": "cuda", "devices": "auto"}),
    "trainer=cpu trainer.devices=2": ("trainer", {"accelerator": "cpu", "devices": 2}),
    "trainer=cpu ~trainer.logger": ("trainer", {"accelerator": "cpu", "logger": None}),
    "callbacks=none": ("callbacks", {"training_health": None, "mine": None}),
    "callbacks=null": ("callbacks", {"training_health": None, "mine": None}),
    "~callbacks": ("callbacks", {"training_health": None, "mine": None}),
    "callbacks=[]": ("callbacks", {"training_health": None, "mine": None}),
    "callbacks=default": ("callbacks", {"checkpoint": {"save_last": True}, "training_health": {"every_n_steps": 5}}),
    "model=llama_lora_tiny": ("model", {"lora": {"r": 8}, "config": {"hidden_size": 32}, "lr": 0.5}),
    "model=gpt2_tiny ~model.config.hidden_size": ("model", {**ARCHITECTURE, "config": {"n_embd": 64}}),
}


def stands(expected: dict[str, Any], values: Any) -> None:
    for key, value in expected.items():
        present = (values or {}).get(key)
        if isinstance(value, dict):
            stands(value, present)
        else:
            assert present == value, key


@pytest.mark.parametrize("words", WON)
def test_a_word_wins_over_the_section_of_a_file_with_a_defaults_list(words: str, tmp_path: Path) -> None:
    name, expected = WON[words]
    values, faults, _ = section(name, write(tmp_path, FILE), *words.split())
    assert not faults
    stands(expected, values)


def test_the_first_pin_stays_the_first_one(tmp_path: Path) -> None:
    path = write(tmp_path, FILE.replace("    lm_head: fp32\n", "    lm_head: fp32\n    '*norm*': fp32\n"))
    values, _, _ = section("plan", path, "plan=fp16", "plan.pins.lm_head=fp16")
    assert list(values["pins"].items()) == [("lm_head", "fp16"), ("*norm*", "fp32")]


def test_a_word_replaces_a_section_that_builds_something_else(tmp_path: Path) -> None:
    own = FILE.replace("  wrap: LlamaDecoderLayer", "  _target_: lightning.pytorch.strategies.SingleDeviceStrategy")
    values, faults, _ = section("strategy", write(tmp_path, own), "strategy=ddp")
    assert not faults
    assert values == {"name": "ddp"}


def test_a_word_over_a_choice_that_the_file_leaves_open(tmp_path: Path) -> None:
    path = write(tmp_path, FILE.replace("- plan: auto", "- plan: ???"))
    values, faults, _ = section("plan", path, "plan=fp16", "trainer=cpu")
    assert not faults
    stands({"precision": "16-mixed", "pins": {"lm_head": "fp32"}}, values)


@pytest.mark.parametrize(
    ("word", "problem", "line"),
    [
        ("strategy=ddp", "unknown keyword 'wrap'", "wrap:"),
        ("model=gpt2_tiny", "model=gpt2_tiny next to model.config.hidden_size", "hidden_size:"),
    ],
)
def test_what_a_word_cannot_take_over_is_refused_with_its_line(
    word: str, problem: str, line: str, tmp_path: Path
) -> None:
    path = write(tmp_path, FILE.replace("cuda", "cpu"))
    result = CliRunner().invoke(app, ["train", path, word, "trainer.accelerator=cpu", "--show"])
    number = next(number for number, text in enumerate(FILE.splitlines(), 1) if line in text)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert f"(run.yaml:{number})" in result.stderr


def test_a_key_that_a_word_sets_is_said_to_stand_on_the_command_line(tmp_path: Path) -> None:
    _, _, places = section("plan", write(tmp_path, FILE), "plan=fp16")
    assert places["plan.precision"] == SET
    assert places["plan.pins.lm_head"].startswith("run.yaml:")


@pytest.mark.parametrize("experiment", shipped()["experiment"])
@pytest.mark.parametrize(
    "word", ["plan=fp32", "plan=fp16", "plan=bf16", "strategy=ddp", "trainer=cpu", "callbacks=none"]
)
def test_a_word_wins_over_every_experiment(experiment: str, word: str) -> None:
    group, _, choice = word.partition("=")
    option: Any = OmegaConf.to_container(OmegaConf.load(shipped()[group][choice]))
    option.pop("defaults", None)
    option = {key: value for key, value in option.items() if group == "plan" or key not in ("_target_", "plan")}
    values, faults, _ = section(group, None, f"experiment={experiment}", word)
    assert not faults
    stands(option, values)
    assert option or not values
    if group == "trainer":
        body: Any = OmegaConf.load(shipped()["experiment"][experiment])
        base: Any = OmegaConf.load(shipped()["experiment"]["longspec"]) if "longspec" in experiment else body
        assert values["max_steps"] == base.trainer.max_steps


@pytest.mark.parametrize("size", ["7b", "70b"])
def test_words_win_over_the_files_that_advise_writes(size: str, tmp_path: Path) -> None:
    path = tmp_path / "advised.yaml"
    gpus = {"7b": "8", "70b": "64"}[size]
    result = CliRunner().invoke(app, ["advise", "--params", size, "--gpus", gpus, "--out", str(path)])
    assert result.exit_code == 0, result.output
    written: Any = OmegaConf.load(path)
    words = ["plan=fp16", "strategy=auto", "trainer=cpu", "callbacks=none"]
    with composing.composed([str(path), *words], "train", Faults("test")) as (config, _):
        assert config["plan"]["precision"] == "16-mixed"
        assert config["plan"].get("checkpointing") == written.plan.get("checkpointing")
        assert config["strategy"]["name"] == "auto"
        assert (config["trainer"]["accelerator"], config["trainer"]["devices"]) == ("cpu", 1)
        assert not config["callbacks"]
