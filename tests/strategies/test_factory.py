"""The factory: names and overrides, refused with what was meant, and Trainer arguments."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, FSDPPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

import lightning_mp
from lightning_mp import MixedPrecisionPlan, PlanError, callbacks, make_strategy, register_plan, trainer_kwargs
from lightning_mp.strategies import registry
from lightning_mp.strategies.registry import STRATEGIES
from support.cells import WHOLE

HOSTS: dict[str, Any] = {
    "auto": DDPStrategy,
    "ddp": DDPStrategy,
    "fsdp2": ModelParallelStrategy,
    "fsdp": ModelParallelStrategy,
    "hsdp": ModelParallelStrategy,
    "pipeline": ModelParallelStrategy,
    "fsdp1": FSDPStrategy,
    "fsdp2_offload": ModelParallelStrategy,
    "fsdp1_offload": FSDPStrategy,
    **{f"deepspeed_zero{stage}{form}": DeepSpeedStrategy for stage in (1, 2, 3) for form in ("", "_offload")},
    **{f"deepspeed_zero{stage}_half": DeepSpeedStrategy for stage in (1, 2)},
}


def _plan() -> MixedPrecisionPlan:
    return MixedPrecisionPlan("16-mixed")


def _given(error: PlanError) -> str:
    return " ".join(fault.problem for fault in error.faults)


def test_the_names_are_those_of_the_table() -> None:
    assert set(STRATEGIES) == set(HOSTS)


@pytest.mark.parametrize("prefix", ["", "mp_"])
@pytest.mark.parametrize("name", HOSTS)
def test_every_name_builds_a_strategy_of_its_host(name: str, prefix: str) -> None:
    made = make_strategy(prefix + name, _plan())
    assert isinstance(made, HOSTS[name])
    assert type(StrategyRegistry.get(f"mp_{name}")) is type(made)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fsdp3", "'fsdp2'"), ("deepspeed_zero_2", "'deepspeed_zero2'"), ("deepspeed_stage_2", "'deepspeed_zero2'"),
        ("zero3_offload", "'deepspeed_zero3_offload'"), ("mp_dpp", "'ddp'"), (None, "write one of these"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_near_ones(name: Any, near: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_strategy(name, _plan())
    assert near in caught.value.faults[0].fix
    assert repr(name) in _given(caught.value)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp", "fsdp1", "deepspeed_zero3_offload"])
def test_unknown_keywords_are_all_refused_at_once_with_near_names(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_strategy(name, _plan(), timeuot=3, process_group_backnd="gloo")
    for fault, word, near in zip(
        caught.value.faults, ("timeuot", "process_group_backnd"), ("timeout", "process_group_backend"), strict=True
    ):
        assert repr(word) in fault.problem
        assert repr(near) in fault.fix


def test_the_plan_must_be_one() -> None:
    with pytest.raises(PlanError, match="plan='16-mixed'"):
        make_strategy("ddp", "16-mixed")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a MixedPrecisionPlan"):
        trainer_kwargs(None)  # type: ignore[arg-type]


def test_trainer_arguments_are_the_whole_regime() -> None:
    plan, monitor, other = _plan(), LearningRateMonitor(), AsyncCheckpointIO()
    strategy: Strategy = make_strategy("fsdp2", plan, wrap="Linear")
    rest = {"devices": 8, "callbacks": [monitor], "max_steps": 5}
    given = trainer_kwargs(plan, strategy=strategy, plugins=[other, plan], **rest)
    assert given == {"plugins": [plan, other], "strategy": strategy, **rest}
    assert isinstance(trainer_kwargs(plan, strategy="fsdp2", plugins=other)["strategy"], ModelParallelStrategy)


#: what stands in a Trainer beside a strategy made for ``_plan()``, and what is said of it
BESIDE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another plan": ({"plugins": [MixedPrecisionPlan("bf16-mixed")]}, ("'bf16-mixed'", "'16-mixed'")),
    "another pin": ({"plugins": [MixedPrecisionPlan("16-mixed", pins={"*norm*": "fp32"})]}, ("pins", "'*norm*'")),
    "a stock plugin": ({"plugins": [DoublePrecision()]}, ("DoublePrecision", "'16-mixed'")),
    "precision=": ({"precision": "bf16-mixed"}, ("bf16-mixed", "'16-mixed'")),
    "precision= in half": ({"precision": "bf16-true"}, ("bf16-true", "'16-mixed'")),
}
#: what says nothing of a plan
NONE_OF_ITS_OWN: list[dict[str, Any]] = [{}, {"precision": "32-true"}, {"plugins": [AsyncCheckpointIO()]}]


def _trainer(**given: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=2, logger=False, **given)


#: a name of every class
EACH = ("ddp", "fsdp2", "hsdp", "fsdp1", "deepspeed_zero2")
by_class = pytest.mark.parametrize("name", EACH)


class TestTheStrategyBringsItsPlan:
    @pytest.mark.parametrize("name", HOSTS)
    def test_where_the_trainer_has_none_of_its_own(self, name: str) -> None:
        plan = _plan()
        for given in NONE_OF_ITS_OWN:
            runner = _trainer(strategy=make_strategy(name, plan), **given)
            assert runner.precision_plugin is plan
            assert runner.precision == "16-mixed"

    @by_class
    def test_the_trainers_own_may_be_the_same_or_an_equal_one(self, name: str) -> None:
        one, equal = _plan(), _plan()
        for given in (one, equal):
            assert _trainer(strategy=make_strategy(name, one), plugins=[given]).precision_plugin is given

    @pytest.mark.parametrize("beside", BESIDE)
    @by_class
    def test_another_is_refused_and_both_are_named(self, name: str, beside: str) -> None:
        given, said = BESIDE[beside]
        with pytest.raises(PlanError) as caught:
            _trainer(strategy=make_strategy(name, _plan()), **given)
        assert all(word in _given(caught.value) for word in said), str(caught.value)

    @pytest.mark.parametrize("name", HOSTS)
    def test_a_registered_name_with_a_stock_plugin_is_refused(self, name: str) -> None:
        with pytest.raises(PlanError, match=r"MixedPrecisionPlan\(...\)"):
            _trainer(strategy=f"mp_{name}", plugins=[FSDPPrecision("bf16-mixed")])


@pytest.fixture
def strategies() -> Iterator[Any]:
    """Lightning's registry of strategies, which is restored."""
    before = dict(StrategyRegistry)
    yield StrategyRegistry
    StrategyRegistry.clear()
    StrategyRegistry.update(before)


def test_a_name_is_registered_once_and_never_over_a_users_own(strategies: Any) -> None:
    def own() -> Any:
        return SingleDeviceStrategy()

    entries = dict(strategies)
    for package in (lightning_mp, callbacks):
        vars(package).pop("make_strategy", None)
        vars(package).pop("TrainingHealth", None)
    assert lightning_mp.make_strategy is make_strategy
    assert callbacks.TrainingHealth.__name__ == "TrainingHealth"
    assert dict(strategies) == entries
    strategies.register("mp_hsdp", own, override=True)
    del strategies["mp_ddp"]
    registry.register()
    assert strategies["mp_hsdp"]["strategy"] is own
    assert strategies["mp_ddp"]["strategy"] is not entries["mp_ddp"]["strategy"]
    assert type(strategies.get("mp_ddp")) is type(make_strategy("ddp", _plan()))
    register_plan("mine", _plan())
    strategies.register("mp_hsdp@mine", own, override=True)
    first = strategies["mp_ddp@mine"]
    register_plan("mine", _plan())
    assert strategies["mp_hsdp@mine"]["strategy"] is own
    assert strategies["mp_ddp@mine"] is not first


def test_a_public_name_is_looked_up_once() -> None:
    for package, names in ((lightning_mp, lightning_mp.__all__), (callbacks, callbacks.__all__)):
        for name in names:
            assert getattr(package, name) is vars(package)[name]


ORDERS = {
    "the plan first": "from lightning_mp import MixedPrecisionPlan; import {copy}; plan = MixedPrecisionPlan()",
    "Lightning first": "import {copy}; from lightning_mp import MixedPrecisionPlan",
    "a callback alone": "import {copy}; from lightning_mp.callbacks import TrainingHealth",
}
LIST = "from {copy}.strategies import StrategyRegistry as r; print(*r.available_strategies())"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["the plan first", "a callback alone", pytest.param("Lightning first", marks=WHOLE)])
def test_every_name_is_registered(order: str) -> None:
    copy = "lightning.pytorch" if order == "the plan first" else "pytorch_lightning"
    program = f"{ORDERS[order]}; {LIST}".format(copy=copy)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert {f"mp_{name}" for name in STRATEGIES} <= set(done.stdout.split())
