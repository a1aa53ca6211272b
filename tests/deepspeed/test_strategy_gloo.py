"""DeepSpeed's ZeRO stages under a plan, in two real processes: what they train is what DDP trains."""

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_mp import LossScaling, PlanError, make_strategy
from lightning_mp.deepspeed import strategy as forward
from support import hf
from support.collectives import Moved
from support.comparing import of_sums, of_training, same, same_runs
from support.deepspeed_json import WHOLE_FP16, fp16_supported
from support.fsdp2_halves import Penalised, Text, text
from support.models import FEATURES, HIDDEN, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import HOSTS, RATE, Both, Ranked, initialised_as_usual, on, refused, trained, whole
from support.traces import lightning_says

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gloo
BAD = 2
Small = partial(Ranked, optimizer="adamw")
OVERFLOWS = partial(Small, bad=(BAD,))
#: A step on a piece of a tensor rounds its last fp32 bits another way than a step on the whole of it.
LAST_BITS = of_training("32-true", RATE)


def _own_init() -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return deepspeed.zero.Init(config_dict_or_path=config)


class LeftOut(Ranked):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 7) else None


class Later(Ranked):
    """Splits its model itself, as it is made."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            with _own_init() if hasattr(self.trainer.strategy, "half_weights") else nullcontext():
                layers = nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
                self.net = nn.Sequential(*layers)


def _both(stage: str, mode: str, module: Any = OVERFLOWS, options: Any = (), **strategy: Any) -> Both:
    return Both(mode, module, dict(options), strategy, f"zero{stage}")


WINDOWS = {"accumulate_grad_batches": 3, "max_epochs": 2}
WITHOUT_NORM = {"zero_optimization": {"compute_grad_norm": False}}
RUNS: dict[str, Both] = {
    "2 left out in a window": _both("2", "bf16-mixed", partial(LeftOut, optimizer="adamw"), WINDOWS),
    "3 made partitioned": _both("3", "16-mixed", Later),
    "2 without DeepSpeed's norm": _both("2", "16-mixed", config=WITHOUT_NORM),
}


def _is_ddps(result: dict[str, Any]) -> bool:
    """DeepSpeed takes a norm in every step, so that an overflow shows; DDP's is taken to clip by."""
    ours, theirs = ({key: run[key] for key in run if key != "norms"} for run in (result["sharded"], result["ddp"]))
    clips = any(map(math.isfinite, result["ddp"]["norms"]))
    norms = not clips or same(result["sharded"]["norms"], result["ddp"]["norms"], of_sums(32))
    return norms and same_runs(ours, theirs, LAST_BITS)


@pytest.mark.older_cpu
@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_ddps(ranks: Ranks, name: str) -> None:
    one, other = ranks.run(RUNS[name])
    for result in (one, other):
        assert _is_ddps(result)
        dtypes = {key: weight.dtype for key, weight in result["ddp"]["weights"].items()}
        assert {key: weight.dtype for key, weight in result["sharded"]["weights"].items()} == dtypes
        assert any(result["sharded"]["skipped"]) == (RUNS[name].module is OVERFLOWS)
    assert same_weights(one["sharded"]["weights"], other["sharded"]["weights"])


def _as_on_cuda(both: Both) -> dict[str, Any]:
    with fp16_supported():
        return both.run()


@pytest.mark.parametrize(("stage", "mode"), [("2", "16-true"), ("3", "16-mixed")])
def test_with_fp16_enabled_in_the_json_nothing_changes(ranks: Ranks, stage: str, mode: str) -> None:
    """As on CUDA, where DeepSpeed takes fp16: its casts are kept out all the same."""
    for result in ranks.call(_as_on_cuda, _both(stage, mode)):
        assert _is_ddps(result)


def _given_and_left() -> dict[str, Any]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    found: dict[str, Any] = {}

    class Asks(Ranked):
        def on_train_start(self) -> None:
            engine: Any = self.trainer.strategy.deepspeed_engine
            scaler = engine.optimizer.loss_scaler
            found["block"] = {key: getattr(engine._config.float16_config, key) for key in WHOLE_FP16}
            found["scaler"] = (scaler.cur_scale, scaler.dynamic)

    plan = plan_for("16-mixed", LossScaling.deepspeed(at_min="hold"))
    with fp16_supported():
        strategy = make_strategy("deepspeed_zero3", plan, config={"fp16": WHOLE_FP16})
        fit(Asks(optimizer="adamw"), plugins=[plan], **on(strategy))
    found["cast"] = DeepSpeedEngine._cast_module_mixed_precision.__qualname__
    return found | {"linear": nn.functional.linear.__module__, "autocast": torch.is_autocast_enabled("cpu")}


def test_a_real_fp16_block_reaches_the_engine_and_nothing_is_left_in_the_process(ranks: Ranks) -> None:
    for found in ranks.call(_given_and_left):
        assert found["block"] == WHOLE_FP16
        assert found["scaler"] == (2.0**16, True)
        assert found["cast"] == "DeepSpeedEngine._cast_module_mixed_precision"
        assert (found["linear"], found["autocast"]) == ("torch._C._nn", False)


def _gathers(mode: str, module: Any, **options: Any) -> dict[str, Any]:
    """A run under ZeRO-3, which else keeps small parameters gathered, in fp32."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return trained(mode, HOSTS["zero3"](config=config), module, **options)


def _half_and_stored() -> dict[str, Any]:
    moved = Moved()
    half = _gathers("bf16-mixed", Text("llama"), data=text(), callbacks=[moved])
    with mock.patch.object(forward.half_weights, "survey", return_value=[]):
        stored = _gathers("bf16-mixed", Text("llama"), data=text(), callbacks=[Moved()])
    return {"half": half, "gathered": sum(moved.steps[2]["gathered"]), "stored": stored}


def _reads_a_weight() -> str:
    return refused(lambda: _gathers("16-mixed", Penalised()))


def test_stage_3_gathers_in_half_precision_and_trains_what_it_did(ranks: Ranks) -> None:
    for result in ranks.call(_half_and_stored):
        assert result["gathered"] == 319_360
        assert same(result["half"], result["stored"])
    for said in ranks.call(_reads_a_weight):
        assert "net.2.weight" in said
        assert "pins={'net.2': 'fp32'}" in said


class MadeLate(LightningModule):
    """Its model is made in ``configure_model``, and initialised or loaded after its parts were."""

    def __init__(self, way: str, pretrained: str) -> None:
        super().__init__()
        self.way, self.pretrained = way, pretrained
        self.model: Any = None
        self.losses: list[float] = []
        self.start: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(5)
            self.model = MADE_LATE[self.way](self.pretrained)

    def on_train_start(self) -> None:
        self.start = whole(self)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.way == "torch's own":
            loss = self.model(batch.float()[..., None].expand(-1, -1, 8)).pow(2).mean()
        else:
            loss = hf.loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def _pretrained(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def _on_meta(_: str) -> Any:
    with torch.device("meta"):
        return hf.llama()


MADE_LATE: dict[str, Any] = {
    "from a config": lambda _: hf.llama(),
    "pretrained": _pretrained,
    "with adapters": lambda _: hf.llama(lora=True),
    "torch's own": lambda _: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "on the meta device": _on_meta,
}


def _made_late(folder: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for way in MADE_LATE:
        if way == "on the meta device" and name == "ddp":
            continue
        module = MadeLate(way, folder)
        fit(module, data=hf.token_batches(), max_steps=2, plugins=[plan_for("32-true")], **HOSTS[name]())
        made[way] = {"start": module.start, "losses": module.losses}
    return made


def test_a_model_of_configure_model_begins_where_it_begins_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """transformers and torch's attention initialise, and ``from_pretrained`` loads, after the parts were made."""
    hf.llama().save_pretrained(tmp_path)
    stock, one, three = (ranks.call(_made_late, str(tmp_path), name)[0] for name in ("ddp", "zero1", "zero3"))
    for way, expected in stock.items():
        for made in (one[way], three[way]):
            assert same_weights(made["start"], expected["start"]), way
            assert same(made["losses"], expected["losses"], LAST_BITS), way
    on_meta = [made["on the meta device"]["start"] for made in (one, three)]
    assert same_weights(*on_meta)
    assert initialised_as_usual(on_meta[0], stock["from a config"]["start"])


ADAM = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}}
AUTO = {"type": "AdamW", "params": {"lr": "auto"}}


class Made(Ranked):
    """Its optimizer is SGD at 0.001, or there is none."""

    def __init__(self, makes: bool) -> None:
        super().__init__(optimizer="sgd")
        self.makes = makes

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.makes else None


def _with_blocks(config: dict[str, Any], *, makes: bool = True) -> dict[str, Any]:
    """The class and rate of what stepped twice, the names of schedules, and what was said; or the refusal."""
    plan = plan_for("32-true")
    strategy = make_strategy("deepspeed_zero2", plan, config=config)
    try:
        with lightning_says() as lines:
            runner = fit(Made(makes), plugins=[plan], max_steps=2, **on(strategy))
    except PlanError as error:
        return {"refused": str(error)}
    zero: Any = runner.optimizers[0]
    schedules = [type(config.scheduler).__name__ for config in runner.lr_scheduler_configs]
    rate = zero.param_groups[0]["lr"]
    return {"made": type(zero.optimizer).__name__, "rate": rate, "schedules": schedules, "said": lines}


def _blocks() -> dict[str, dict[str, Any]]:
    return {
        "both": _with_blocks({"optimizer": ADAM}),
        "the module's, the JSON's schedule": _with_blocks({"optimizer": ADAM, "scheduler": WARM_UP}),
        "the JSON's": _with_blocks({"optimizer": ADAM}, makes=False),
        "nobody's": _with_blocks({}, makes=False),
        "the JSON's, unresolved": _with_blocks({"optimizer": AUTO}, makes=False),
        "unresolved and unused": _with_blocks({"optimizer": AUTO}),
        "unresolved schedule": _with_blocks({"scheduler": {**WARM_UP, "params": {"warmup_max_lr": "auto"}}}),
        "LAMB": _with_blocks({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, makes=False),
    }


def test_the_modules_optimizer_steps_whatever_the_json_says_and_a_line_says_so(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.call(_blocks)):
        both = found["both"]
        assert (both["made"], both["rate"], both["schedules"]) == ("SGD", 1e-3, [])
        line = f"optimizer={ADAM!r} in the JSON is not used: configure_optimizers() makes SGD"
        assert [line for line in both["said"] if "in the JSON" in line] == ([line] if rank == 0 else [])
        scheduled = found["the module's, the JSON's schedule"]
        assert (scheduled["made"], scheduled["rate"], scheduled["schedules"]) == ("SGD", 0.25, ["WarmupLR"])
        told = [line for line in scheduled["said"] if "in the JSON sets the learning rates of SGD" in line]
        assert len(told) == (rank == 0)
        assert found["unresolved and unused"]["made"] == "SGD"
        alone = found["the JSON's"]
        assert (alone["made"], alone["rate"]) == ("AdamW", 0.1)  # DeepSpeed takes AdamW for Adam
        assert not [line for line in alone["said"] if "in the JSON" in line]


REFUSED_BLOCKS = {
    "nobody's": "configure_optimizers() returned None with ZeRO",
    "the JSON's, unresolved": "optimizer.params.lr='auto' in the JSON, which nobody resolves",
    "unresolved schedule": "scheduler.params.warmup_max_lr='auto' in the JSON, which nobody resolves",
    "LAMB": "optimizer.type='Lamb' in the JSON, which needs whole parameters",
}


def test_without_an_optimizer_that_can_step_the_run_is_refused(ranks: Ranks) -> None:
    for found in ranks.call(_blocks):
        for which, said in REFUSED_BLOCKS.items():
            assert said in found[which]["refused"]
