"""What users write to weights under ZeRO is kept as under DDP, or refused; an average that never moves is said."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_mp import MixedPrecisionPlan
from lightning_mp.checkpoints import read_full
from support.comparing import of_training, same
from support.ranks import Ranks
from support.running import fit
from support.sharded import RATE, Ranked, under, whole

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo
LAST_BITS = of_training("32-true", RATE)


def _clip_by_assignment(module: Any) -> None:
    for weight in module.net.parameters():
        weight.data = weight.data.clamp(-0.1, 0.1)


def _clip_in_place(module: Any) -> None:
    for weight in module.net.parameters():
        weight.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def _clip_without_data(module: Any) -> None:
    for weight in module.net.parameters():
        weight.clamp_(-0.1, 0.1)


def _follow_by_assignment(module: Any) -> None:
    for student, teacher in zip(module.net[0].parameters(), module.teacher.parameters(), strict=True):
        teacher.data = teacher.data * 0.5 + student.data * 0.5


def _follow_in_place(module: Any) -> None:
    for student, teacher in zip(module.net[0].parameters(), module.teacher.parameters(), strict=True):
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


@torch.no_grad()
def _follow_gathered(module: Any) -> None:
    import deepspeed

    weights = [*module.net[0].parameters(), *module.teacher.parameters()]
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        _follow_in_place(module)


def _halve(module: Any) -> None:
    module.net[0].weight.data = module.net[0].weight.data.bfloat16()


#: what changes weights; the way of a project that trains by a teacher, of a clipped critic, of a projection
WRITES = {
    write.__name__: write
    for write in (
        _clip_by_assignment,
        _clip_in_place,
        _clip_without_data,
        _follow_by_assignment,
        _follow_in_place,
        _follow_gathered,
        _halve,
    )
}
KEPT = [name for name in WRITES if name != "_halve"]
#: where ZeRO-1 and 2 have whole weights, whose masters may be on the CPU
WHOLE = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero2_offload")
#: ZeRO-3 keeps small weights gathered between steps, unless it is told otherwise
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Writes(Ranked):
    def __init__(self, write: str, hook: str = "on_train_batch_end", path: Path | None = None) -> None:
        super().__init__(optimizer="adamw")
        self.write, self.hook, self.path = WRITES[write], hook, path
        self.teacher = nn.Linear(16, 32).requires_grad_(False)
        self.teacher.load_state_dict(self.net[0].state_dict())

    def loss(self, batch: Any) -> Tensor:
        apart = (self.net[0](batch[0]) - self.teacher(batch[0])).pow(2).mean()
        return super().loss(batch) + apart

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.hook == "on_before_zero_grad":
            self.write(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.hook == "training_step":
            self.write(self)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *rest: Any) -> None:
        if self.hook == "on_train_batch_end":
            self.write(self)
        if self.path is not None and self.trainer.global_step == 3:
            self.trainer.save_checkpoint(self.path)
            self.saved = whole(self)


def _run(strategy: str, module: LightningModule, callbacks: Any = (), **options: Any) -> dict[str, Any]:
    plan = MixedPrecisionPlan("32-true")
    try:
        fit(module, max_steps=4, callbacks=[*callbacks], **under(strategy, plan, **options))
    except RuntimeError as error:
        return {"error": str(error)}
    return {"losses": getattr(module, "losses", []), "weights": whole(module)}


CELLS = [(write, hook) for write in KEPT[:2] for hook in ("training_step", "on_before_zero_grad")]
CELLS += [(write, "on_train_batch_end") for write in KEPT if write != "_follow_gathered"]


def _written(strategy: str) -> dict[Any, dict[str, Any]]:
    return {cell: _run(strategy, Writes(*cell)) for cell in CELLS}


@pytest.mark.parametrize("strategy", WHOLE)
def test_whole_weights_are_those_that_were_written(ranks: Ranks, strategy: str) -> None:
    ddp, zero = (ranks.call(_written, name)[0] for name in ("ddp", strategy))
    for cell, expected in ddp.items():
        assert same(zero[cell], expected, LAST_BITS), cell


def _refused(config: dict[str, Any]) -> dict[str, str]:
    writes = [write for write in KEPT if write != "_follow_gathered"]
    cells = [(write, "on_train_batch_end") for write in (writes if config else writes[1:4:2])]
    cells.append(("_clip_by_assignment", "training_step"))
    results = {cell: _run("deepspeed_zero3", Writes(*cell), config=config) for cell in cells}
    return {" ".join(cell): result.get("error", "went on") for cell, result in results.items()}


@pytest.mark.parametrize("config", [{}, SPLIT], ids=["small weights stay gathered", "every weight is split"])
def test_a_write_to_a_split_weight_is_refused_where_it_is_made(ranks: Ranks, config: dict[str, Any]) -> None:
    for said in ranks.call(_refused, config):
        for name, error in said.items():
            owner = name.partition(" ")[2] if "training_step" in name else f"Writes.{name.partition(' ')[2]}"
            weight = "'teacher.weight'" if "follow" in name else "'net.0.weight'"
            assert f"{weight} written to in {owner} with ZeRO-3" in error, name
            assert "GatheredParameters" in error


def _gathered() -> list[dict[str, Any]]:
    module = partial(Writes, "_follow_gathered")
    return [_run("ddp", Writes("_follow_in_place")), _run("deepspeed_zero3", module(), config=SPLIT)]


def test_a_teacher_that_follows_gathered_weights_is_ddps(ranks: Ranks) -> None:
    for ddp, zero in ranks.call(_gathered):
        assert same(zero, ddp, LAST_BITS)


def _saved(folder: str) -> list[dict[str, Tensor]]:
    path = Path(folder) / "saved.ckpt"
    module = Writes("_clip_by_assignment", path=path)
    _run("deepspeed_zero2", module)
    return [module.saved, read_full(path)["state_dict"]]


def test_a_checkpoint_has_what_was_written_after_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    for held, saved in ranks.call(_saved, str(tmp_path)):
        assert max(float(weight.abs().max()) for name, weight in saved.items() if name.startswith("net")) < 0.1001
        assert same(saved, held)


def _other_dtype() -> str:
    return _run("deepspeed_zero1", Writes("_halve"))["error"]


def test_a_tensor_of_another_dtype_is_refused(ranks: Ranks) -> None:
    for said in ranks.call(_other_dtype):
        assert "'net.0.weight'.data = a tensor of torch.bfloat16" in said
        assert "which holds torch.float32" in said


class Shadow(Callback):
    """An average as many projects write it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shadow = {name: weight.data.clone() for name, weight in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        for name, weight in pl_module.named_parameters():
            self.shadow[name].mul_(0.9).add_(weight.data, alpha=0.1)


class Averages(Callback):
    """torch's average of the model, made and moved by a callback."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = AveragedModel(pl_module.net)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self.average.update_parameters(pl_module.net)


class Averaging(Ranked):
    """Holds torch's average of its own net, as timm's examples hold their average."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.average = AveragedModel(self.net).requires_grad_(False)

    def on_train_batch_end(self, *rest: Any) -> None:
        self.average.update_parameters(self.net)


def _averages() -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for name, module, callbacks, strategy in (
        ("shadow", Ranked(optimizer="adamw"), [Shadow()], "deepspeed_zero3"),
        ("averages", Ranked(optimizer="adamw"), [Averages()], "deepspeed_zero3"),
        ("module's", Averaging(), [], "deepspeed_zero3"),
        ("whole", Ranked(optimizer="adamw"), [Shadow()], "deepspeed_zero2"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"config": SPLIT} if strategy == "deepspeed_zero3" else {}
            result = _run(strategy, module, callbacks, **options)
        words = [str(warning.message) for warning in caught] + [result.get("error", "")]
        said[name] = [line for line in words if "ZeRO-3 holds it" in line or "with ZeRO-3" in line]
    return said


def test_an_average_that_never_moves_is_said_once_by_its_name(ranks: Ranks) -> None:
    said = ranks.call(_averages)[0]
    (shadow,), (averages,), (module,) = said["shadow"], said["averages"], said["module's"]
    assert shadow.startswith("Shadow.on_train_start computes from 'net.0.weight', which is empty there")
    assert averages.startswith("Averages.on_train_start computes from 'net.0.weight', which is empty there")
    assert "'average.module.0.weight' written to in Averaging.on_train_batch_end" in module
    assert said["whole"] == []
