"""Groups of one dtype each, whose schedules follow; whole weights loaded; the loss scale that DeepSpeed is told."""

import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from lightning_mp import LossScaling, PlanError, make_strategy
from lightning_mp.compat.deepspeed import PlanScale
from lightning_mp.deepspeed.strategy import load_full_state, split_by_dtype
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.strategies.base import PlanStrategy
from support.models import Regression, weights
from support.oracles import plan_for
from support.ranks import Call, in_a_process, run_ranks
from support.running import fit


def _weight(dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=trained)


def _sgd(*groups: list[nn.Parameter]) -> Optimizer:
    rated = [{"params": members, "lr": 1.0 / (index + 1)} for index, members in enumerate(groups)]
    return SGD(rated, lr=9.0, momentum=0.9)


def _two() -> tuple[Optimizer, list[nn.Parameter]]:
    members = [_weight(torch.float16), _weight(), _weight(torch.float16)]
    return _sgd(members[:2], members[2:]), members


def _ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def test_fp32_comes_first_and_each_piece_keeps_its_groups_settings() -> None:
    optimizer, (half, whole, other) = _two()
    assert split_by_dtype(optimizer, None) == [0, 0, 1]
    assert _ids(optimizer) == [[id(whole)], [id(half)], [id(other)]]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0, 0.5]
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    optimizer.param_groups[0]["lr"] = 7.0
    assert optimizer.param_groups[1]["lr"] == 1.0  # no dict is shared


def test_a_frozen_half_weight_neither_splits_a_group_nor_leads_it() -> None:
    """DeepSpeed takes the first parameter's dtype for that of the engine."""
    frozen, trained = _weight(torch.bfloat16, trained=False), _weight()
    optimizer = _sgd([frozen, trained])
    assert split_by_dtype(optimizer, None) == [0]
    assert _ids(optimizer) == [[id(trained), id(frozen)]]


def test_a_group_with_nothing_to_train_comes_last() -> None:
    frozen, half, whole = _weight(trained=False), _weight(torch.bfloat16), _weight()
    optimizer = _sgd([frozen], [half], [whole])
    assert split_by_dtype(optimizer, None) == [2, 1, 0]
    assert _ids(optimizer) == [[id(whole)], [id(half)], [id(frozen)]]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 1 / (3 + n)]),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=[0.1, 0.5], total_steps=12),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [SCHEDULES["LambdaLR"](o), schedules.StepLR(o, 2), schedules.ExponentialLR(o, 0.5)], [2, 5]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, min_lr=[0.3, 0.1]),
}


def _rates(optimizer: Optimizer, schedule: Any, steps: int = 9) -> list[list[float]]:
    found: list[list[float]] = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(1.0) if isinstance(schedule, schedules.ReduceLROnPlateau) else schedule.step()
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_piece_follows_its_groups_schedule(name: str) -> None:
    plain, _ = _two()
    expected = _rates(plain, SCHEDULES[name](plain))
    optimizer, _ = _two()
    schedule = SCHEDULES[name](optimizer)
    source_group = split_by_dtype(optimizer, schedule)
    assert _rates(optimizer, schedule) == [[rates[group] for group in source_group] for rates in expected]


def test_a_checkpoint_has_a_schedule_in_the_users_order_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where groups were reordered and none was split, too: another strategy would read the rates of other groups."""
    strategy: Any = make_strategy("deepspeed_zero2", plan_for("bf16-mixed"))
    strategy.model, strategy._source_group = SimpleNamespace(checkpoint_engine=True), [1, 2, 0]
    monkeypatch.setattr(PlanStrategy, "save_checkpoint", lambda *_, **__: None)
    state = {"base_lrs": [0.2, 0.3, 0.1]}
    strategy.save_checkpoint({"lr_schedulers": [state]}, "last.ckpt")
    assert state == {"base_lrs": [0.1, 0.2, 0.3]}


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "new.")] = state.pop(name)


def test_checkpoints_of_earlier_versions_of_a_module_load() -> None:
    plain, net = (nn.Sequential(Renamed(), nn.BatchNorm1d(2)) for _ in range(2))
    saved = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items() if "num_batches" not in name}
    state = {name.replace("new", "old"): tensor for name, tensor in saved.items()}
    plain.load_state_dict(state)
    load_full_state(net, state, strict=True)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    assert "0.old.weight" in state


host = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
RULE = LossScaling.deepspeed(initial_scale_power=4, loss_scale_window=2, hysteresis=2, at_min="hold")


def _after(rule: LossScaling, overflows: list[bool]) -> LossScaler:
    scaler = LossScaler(rule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for overflow in overflows:
        scaler.note_step(optimizer, torch.tensor(float(overflow)))
        scaler.update()
    return scaler


def test_it_tells_the_plans_scale_and_nobody_else_moves_it() -> None:
    scaler = _after(RULE, [])
    scale = PlanScale(scaler)
    assert (scale.cur_scale, scale.loss_scale) == (16.0, 16.0)
    scale.cur_scale = 4.0
    for _ in range(10):
        scale.update_scale(False)
    scale.update_scale(True)
    assert scale.cur_scale == scaler.get_scale() == 16.0
    loss = torch.ones(())
    assert scale.scale_loss(loss) is loss


@pytest.mark.parametrize(("rule", "kind"), [(RULE, "DynamicLossScaler"), (LossScaling.static(8.0), "LossScaler")])
def test_a_checkpoint_holds_a_scaler_of_deepspeeds_with_the_scale(rule: LossScaling, kind: str) -> None:
    scaler = _after(rule, [True, True])
    alone = pickle.loads(pickle.dumps(PlanScale(scaler)))
    assert type(alone) is getattr(host, kind)
    assert alone.cur_scale == scaler.get_scale()
    assert getattr(alone, "scale_window", rule.growth_interval) == rule.growth_interval


class Declines(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


def _declined() -> int:
    plan = plan_for("bf16-mixed")
    with pytest.raises(RuntimeError, match=r"returned None on the last batch of a window.*Return a loss of zero"):
        fit(Declines(), plugins=[plan], strategy="mp_deepspeed_zero2", accumulate_grad_batches=2)
    return plan.applied_steps


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_window_whose_last_batch_gave_no_loss_is_an_error_not_a_lost_update() -> None:
    assert in_a_process(_declined) == 1


def _with(optimizer: Any) -> dict[str, torch.Tensor]:
    module = Regression(partial(optimizer, lr=1e-2, weight_decay=0.0))
    fit(module, plugins=[plan_for("bf16-mixed")], strategy="mp_deepspeed_zero2_offload")
    return weights(module)


def _cpu_adam() -> str:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ours, torchs = _with(DeepSpeedCPUAdam), _with(torch.optim.AdamW)
    assert all((ours[name] - torchs[name]).abs().max() < 1e-4 for name in ours), (ours, torchs)
    module = Regression(partial(DeepSpeedCPUAdam, lr=1e-2))
    with pytest.raises(PlanError, match="DeepSpeedCPUAdam on sharded parameters, which needs whole parameters, or"):
        fit(module, plugins=[plan_for("bf16-mixed")], strategy="mp_fsdp2")
    return "done"


@pytest.mark.slow
@pytest.mark.whole
def test_deepspeeds_adam_trains_with_offload_and_is_refused_where_weights_are_dtensors() -> None:
    """Its native half, which torch compiles on first use, dies with any copy of it."""
    assert run_ranks(Call(_cpu_adam, ()), world=1, seconds=900) == ["done"]
