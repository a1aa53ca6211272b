"""Bad input is refused before the first step, every fault in one error, and the module is as it was."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, StrategyRegistry
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD

from lightning_mp import MixedPrecisionPlan, NonFiniteError, PlanError, doctor
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.compat.torch import cpu_has_lstm
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from support.language import Language, gpt2, tokens
from support.manual import Manual
from support.models import Regression, same_weights, weights
from support.oracles import SCALED, plan_for, stock_for
from support.running import fit, trainer
from support.traces import Trace


def _snapshot(module: LightningModule) -> tuple[Any, ...]:
    return (
        weights(module),
        [type(m) for m in module.modules()],
        {name: p.dtype for name, p in module.named_parameters()},
        {name: id(p) for name, p in module.named_parameters()},
        [key for m in module.modules() for key in m.__dict__ if key.startswith("_lmp") or key == "lr_scheduler_step"],
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


def _refused(module: LightningModule, plan: MixedPrecisionPlan, data: Any = None, **options: Any) -> PlanError:
    """The error, after checking that nothing was trained and nothing was changed."""
    before = _snapshot(module)
    with pytest.raises(PlanError) as caught:
        fit(module, plugins=[plan], data=data, **options)
    after = _snapshot(module)
    assert same_weights(before[0], after[0])
    assert before[1:] == after[1:]
    assert module.losses == []
    for fault in caught.value.faults:
        assert str(fault) in str(caught.value)
        assert fault.problem
        assert fault.fix
    return caught.value


@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
def test_lbfgs_under_scaling_is_refused(mode: str) -> None:
    module = Regression(partial(torch.optim.LBFGS, lr=0.1))
    plan = MixedPrecisionPlan(mode, pins={"LayerNorm": "bf16"}, checkpointing="Linear")
    with pytest.raises(PlanError) as error:
        fit(module, plugins=[plan])
    assert module.losses == []
    for word in ("LBFGS", repr(mode), "bf16-mixed", "32-true"):
        assert word in str(error.value)


def test_all_faults_of_a_plan_are_reported_together() -> None:
    plan = MixedPrecisionPlan(
        "bf16-true",
        pins={"lm_haed": "fp32", "*nrom*": "fp32", "lm_head": "fp32", "wte": "bf16"},
        checkpointing="GPT2Blokc",
    )
    error = _refused(Language(gpt2()), plan, tokens())
    assert len(error.faults) == 4
    given = " ".join(fault.problem for fault in error.faults)
    for word in ("'lm_haed'", "'*nrom*'", "'GPT2Blokc'", "tied"):
        assert word in given
    assert "'lm_head'" in str(error)  # the nearest names
    assert "'GPT2Block'" in str(error)


class Recurrent(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.lstm(batch[0].unsqueeze(1))[0].squeeze(1), batch[1]))


@pytest.mark.parametrize("half", ["16", "bf16"])
def test_an_lstm_under_autocast_is_refused_where_onednn_has_none(half: str) -> None:
    mixed, name = f"{half}-mixed", "fp16" if half == "16" else half
    if cpu_has_lstm(TORCH_DTYPES[name]):
        assert fit(Recurrent(), plugins=[MixedPrecisionPlan(mixed)]).state.finished
        return
    module = Recurrent()
    with pytest.raises(PlanError, match=r"nn\.LSTM 'lstm' in \w+ on this CPU.*pins=\{'LSTM': 'fp32'\}") as error:
        fit(module, plugins=[MixedPrecisionPlan(mixed)])
    assert "primitive descriptor" in str(error.value.__cause__)
    assert (type(module.lstm), module.losses) == (nn.LSTM, [])
    (finding,) = [found for found in doctor(Recurrent(), MixedPrecisionPlan(mixed)) if found.severity == "warning"]
    assert (finding.name, finding.where) == ("precision_refused", "lstm")
    assert "pins={'LSTM': 'fp32'}" in finding.fix
    pinned = [MixedPrecisionPlan(mixed, pins={"LSTM": dtype}) for dtype in ("fp32", name)]
    assert not [found for plan in pinned for found in doctor(Recurrent(), plan) if found.name == "precision_refused"]
    plans = (*pinned, MixedPrecisionPlan(f"{half}-true"))
    assert all(fit(Recurrent(), plugins=[plan]).state.finished for plan in plans)


class OtherForm(Recurrent):
    """An LSTM that needs no kernel of oneDNN's: its input is packed, or it has projections."""

    def __init__(self, lengths: list[int] | None) -> None:
        super().__init__()
        self.lengths = lengths
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.lstm = nn.LSTM(16, 20, proj_size=16, batch_first=True) if lengths is None else nn.LSTM(16, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        if self.lengths is None:
            return super().loss(batch)
        packed = pack_padded_sequence(batch[0].repeat(2, 1, 1), torch.tensor(self.lengths))
        return Regression.loss(self, (self.lstm(packed)[1][0][0], batch[1]))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("lengths", [None, [2, 2, 2, 2, 1, 1, 1, 1]])
def test_an_lstm_that_needs_nothing_of_onednn_trains_as_stock(lengths: list[int] | None, mode: str) -> None:
    ours, theirs = OtherForm(lengths), OtherForm(lengths)
    fit(ours, plugins=[plan_for(mode)])
    fit(theirs, **stock_for(mode))
    assert ours.losses == theirs.losses


@pytest.mark.parametrize("mode", ["16-mixed", "bf16-mixed"])
def test_a_packed_batch_whose_sequences_have_one_length_trains_too(mode: str) -> None:
    """torch takes oneDNN for it, which may have no kernel."""
    module, fp32 = OtherForm([2] * 8), OtherForm([2] * 8)
    fit(module, plugins=[plan_for(mode)])
    fit(fp32, plugins=[plan_for("32-true")])
    assert module.losses == pytest.approx(fp32.losses, rel=0.05)
    assert torch.backends.mkldnn.is_available()
    assert type(module.lstm) is nn.LSTM


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's own, where the flags are set
def test_an_lstm_trains_where_onednn_is_switched_off() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert fit(Recurrent(), plugins=[plan_for("16-mixed")]).state.finished


PLAIN = partial(SGD, lr=1e-3)


def bare(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.loss(batch).backward()
    opt.step()


@pytest.mark.parametrize("mode", SCALED)
def test_a_bare_backward_under_a_loss_scale_is_refused_before_it_is_applied(mode: str) -> None:
    module, trace = Manual(bare), Trace()
    with pytest.raises(PlanError, match=r"a loss that was not scaled.*manual_backward"):
        fit(module, plugins=[plan_for(mode)], callbacks=[trace])
    assert same_weights(weights(module), trace.start)


class Raw(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.trainer.optimizers[0].step(optimizer_closure)


def raw(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    opt.optimizer.step()


RAW: dict[str, Any] = {"optimizer_step": Raw, "by hand": partial(Manual, raw)}


@pytest.mark.parametrize("how", RAW)
@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("optimizer", [PLAIN, partial(torch.optim.SGD, lr=0.0)], ids=["plain", "at rate 0"])
def test_a_raw_step_under_a_loss_scale_is_refused(optimizer: Any, mode: str, how: str) -> None:
    module, trace = RAW[how](optimizer=optimizer), Trace()
    with pytest.raises(PlanError, match=r"SGD\.step\(\) called on the optimizer inside of Lightning's"):
        fit(module, plugins=[plan_for(mode)], callbacks=[trace])
    assert same_weights(weights(module), trace.start)


@pytest.mark.parametrize(("mode", "steps", "said"), [("bf16-mixed", 1, ""), ("16-mixed", 8, "scale ended at 1\\.")])
def test_a_run_that_applied_no_step_ends_as_an_error(mode: str, steps: int, said: str, tmp_path: Path) -> None:
    module, plan = Regression(overflow_at=tuple(range(8))), plan_for(mode)
    health, numbers = TrainingHealth(tmp_path, alerts=False), weights(module)
    with pytest.raises(NonFiniteError, match=f"applied 0 of its {steps} optimizer steps.*{said}"):
        fit(module, plugins=[plan], callbacks=[health], max_steps=steps)
    about, page = json.loads((tmp_path / "run.json").read_text()), (tmp_path / "report.html").read_text()
    assert about["status"] == "failed"
    assert "applied 0 of its" in about["error"]
    assert "The run failed: </strong>NonFiniteError: The run applied 0 of its" in page
    assert plan.engine is None
    assert same_weights(weights(module), numbers)
    fit(Regression(), plugins=[plan])


class TestWhereAPlanDoesNotBelong:
    def test_among_the_callbacks(self) -> None:
        with pytest.raises(PlanError, match="Write Trainer"):
            fit(Regression(), callbacks=[plan_for("bf16-mixed")])

    def test_outside_of_a_run(self) -> None:
        runner = fit(Regression(), plugins=[plan_for("bf16-mixed")])
        with pytest.raises(RuntimeError, match=r"trainer\.fit\(\.\.\.\) again"):
            runner.strategy.optimizer_step(runner.optimizers[0], lambda: None)


def _faults(kind: Any, options: dict[str, Any], precision: str = "bf16-mixed", **fields: Any) -> tuple[Any, ...]:
    module, plan = Regression(), MixedPrecisionPlan(precision, **fields)
    strategy = kind(cluster_environment=LightningEnvironment(), **options)
    module.trainer = trainer(plugins=[plan], strategy=strategy, devices=2)
    try:
        plan.convert_module(module)
    except PlanError as error:
        return error.faults
    finally:
        plan.teardown()
    return ()


STOCK = {
    "a subclass of FSDP": (type("OwnFSDP", (FSDPStrategy,), {}), {}, "mp_fsdp1"),
    "DeepSpeed": (DeepSpeedStrategy, {}, "mp_deepspeed_zero2"),
    "ZeRO-2 with offload": (DeepSpeedStrategy, {"stage": 2, "offload_optimizer": True}, "mp_deepspeed_zero2_offload"),
    "a JSON": (DeepSpeedStrategy, {"config": {"zero_optimization": {"stage": 3}}}, "mp_deepspeed_zero3"),
}


@pytest.mark.parametrize(("kind", "options", "instead"), STOCK.values(), ids=STOCK)
def test_a_stock_sharded_strategy_is_refused_with_the_one_that_does(
    kind: Any, options: dict[str, Any], instead: str
) -> None:
    (fault,) = _faults(kind, options)
    assert fault.problem == f"strategy {kind.__name__}"
    assert f"strategy={instead!r}" in fault.fix
    assert instead in StrategyRegistry.available_strategies()


HOOKS: dict[str, Any] = {
    "none": {},
    "allreduce": {"ddp_comm_hook": default_hooks.allreduce_hook},
    "fp16 compression": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "compression around PowerSGD": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "PowerSGD": {"ddp_comm_hook": powerSGD_hook.powerSGD_hook},
}


@pytest.mark.parametrize(
    ("hook", "precision", "fields", "refused"),
    [
        ("none", "bf16-mixed", {}, False),
        ("allreduce", "32-true", {}, False),
        ("allreduce", "16-mixed", {}, False),
        ("allreduce", "bf16-mixed", {"pins": {"LayerNorm": "fp32"}}, False),
        ("PowerSGD", "16-mixed", {}, False),
        # the hook would have to sum in another dtype than the gradients'
        ("allreduce", "bf16-true", {}, True),
        ("allreduce", "bf16-mixed", {"reduce_dtype": "bf16"}, True),
        ("allreduce", "bf16-mixed", {"pins": {"LayerNorm": "bf16"}}, True),
        # gradients that are stored as they are summed need no hook of ours
        ("allreduce", "bf16-true", {"reduce_dtype": "bf16"}, False),
        # two would decide the dtype
        ("fp16 compression", "32-true", {}, True),
        ("compression around PowerSGD", "32-true", {}, True),
    ],
)
def test_communication_hooks(hook: str, precision: str, fields: dict[str, Any], refused: bool) -> None:
    found = _faults(DDPStrategy, HOOKS[hook], precision, **fields)
    assert len(found) == refused
    for fault in found:
        assert HOOKS[hook]["ddp_comm_hook"].__name__ in fault.problem
        assert "remove the hook" in fault.fix
