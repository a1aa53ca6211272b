"""One rank's fault is everybody's skip, and is named: of the guard, and of a replay alone under every strategy."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import AdamW

from lightning_mp import NonFinite, NonFiniteError
from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.callbacks import NonFiniteGuard
from lightning_mp.plan.diagnosis import Diagnosis
from support import sharded_hosts
from support.comparing import of_training, same
from support.models import same_weights
from support.nonfinite import BAD, FAULTS, Breaks, without
from support.oracles import plan_for, stock_for
from support.ranks import Ranks
from support.running import fit
from support.sharded import ddp, on, refused, under, whole

GUILTY = 1


class Ranked(Breaks):
    """Each rank has data of its own; rank ``GUILTY`` alone breaks; under FSDP2 every layer is a unit of its own."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,), **options: Any) -> None:
        optimizer = partial(AdamW, lr=1e-3, eps=1e-4, weight_decay=0.3)
        super().__init__(how, bad, **{"optimizer": optimizer, "guilty": GUILTY, **options})

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] * (1 + self.global_rank), batch[1]))


class Sharded(Ranked):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for layer in [*self.net, self.net]:
            if not isinstance(layer, FSDPModule) and any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


HOSTS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")


def _host(name: str) -> dict[str, Any]:
    return ddp() if name == "ddp" else on(getattr(sharded_hosts, name)())


def _kind(host: str) -> type[Ranked]:
    return Sharded if host == "fsdp2" else Ranked


@dataclass(frozen=True)
class Guarded:
    host: str
    mode: str
    how: str
    folder: Path
    bad: tuple[int, ...] = (BAD,)
    #: the guard's own, and the Trainer's
    guard: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / f"{self.host}_{self.mode}_{self.how}_{self.bad}"

    def _fit(self, module: Ranked, **options: Any) -> None:
        fit(module, **options, **self.options, **_host(self.host), **stock_for(self.mode))

    def run(self) -> dict[str, Any]:
        guard, error = NonFiniteGuard(run_dir=self.run_dir, **self.guard), None
        broken = _kind(self.host)(self.how, self.bad)
        try:
            self._fit(broken, callbacks=[guard])
        except NonFiniteError as raised:
            error = raised.rank, raised.step, raised.module
        found = {
            "events": [event.to_dict() for event in guard.events],
            "counts": (guard.skipped_steps, guard.applied_steps),
            "weights": whole(broken),
            "files": sorted(path.name for path in (self.run_dir / "nonfinite").glob("*.pt")),
            "error": error,
        }
        if error is None and self.how != "weight":
            clean = _kind(self.host)(self.how, ())
            self._fit(clean, data=without(*self.bad))
            found["clean"] = whole(clean)
        return found


def under_deepspeed(folder: Path) -> str:
    guard, host = NonFiniteGuard(run_dir=folder), on(sharded_hosts.deepspeed(2))
    return refused(lambda: fit(Ranked("gradient"), callbacks=[guard], **host))


def no_folder(folder: Path) -> str:
    return refused(lambda: fit(Ranked("gradient"), callbacks=[NonFiniteGuard(run_dir=folder)], **ddp()))


class Asks(Callback):
    def __init__(self) -> None:
        self.replayer, self.diagnoses = Replayer(), list[Diagnosis]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.replayer.remember(trainer, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.diagnoses.append(self.replayer.locate(trainer))


@dataclass(frozen=True)
class Replayed:
    """A run under a plan of which every batch is replayed, beside the same run without."""

    strategy: str
    mode: str
    how: str

    def run(self) -> dict[str, Any]:
        asks = Asks()
        asked, plain = self._weights(asks), self._weights()
        diagnoses = [(found.rank, found.origin and found.origin.module, found.bad_loss) for found in asks.diagnoses]
        batches = [found.batch_idx for found in asks.diagnoses]
        return {"asked": asked, "plain": plain, "diagnoses": diagnoses, "batches": batches}

    def _weights(self, *callbacks: Callback) -> dict[str, Tensor]:
        torch.manual_seed(1)
        plan, module = plan_for(self.mode), Ranked(self.how)
        host = under(self.strategy, plan)
        torch.manual_seed(1)
        fit(module, callbacks=list(callbacks), gradient_clip_val=1.0, **host)
        return whole(module)


@dataclass(frozen=True)
class Rewound:
    """Rewinds at batch 5 to the checkpoint of step 4: a guard on a stock strategy, or a plan on its own."""

    host: str
    folder: Path
    planned: bool = False

    def _who(self) -> dict[str, Any]:
        if not self.planned:
            return {"callbacks": [NonFiniteGuard("rewind", run_dir=self.folder)], **_host(self.host)}
        rule = NonFinite(max_consecutive=0, on_budget="rewind", save_batch=True, run_dir=str(self.folder))
        plan = plan_for("32-true", nonfinite=rule)
        name = f"deepspeed_{self.host}" if self.host.startswith("zero") else self.host
        return {"callbacks": [], **under(name, plan)}

    def run(self) -> dict[str, Any]:
        kept: dict[int, Any] = {}

        class Keeps(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
                kept[trainer.global_step] = whole(pl_module)

        # a plan refuses weights that are changed behind ZeRO's partitions: there the step of batch 4 is what is undone
        spoils = not (self.planned and self.host.startswith("zero"))

        class Spoilt(Ranked if self.planned else _kind(self.host)):  # type: ignore[misc]
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if batch_idx == 5 and spoils:
                    with torch.no_grad():
                        for parameter in self.parameters():
                            parameter.add_(1)

        module, who = Spoilt("loss", (5,)), self._who()
        callbacks = [*who.pop("callbacks"), Keeps(), ModelCheckpoint(self.folder / "saved", every_n_train_steps=4)]
        fit(module, callbacks=callbacks, enable_checkpointing=True, **who)
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return {
            "kept": kept,
            "events": [json.loads(line)["action"] for line in lines],
            "files": sorted(path.name for path in (self.folder / "nonfinite").glob("*.pt")),
            "batches": len(module.losses),
        }


pytestmark = [pytest.mark.gloo, pytest.mark.slow]
PASSING = [how for how in FAULTS if how != "weight"]
CASES = [
    *(("ddp", "32-true", how) for how in PASSING), *((host, "32-true", "gradient") for host in ("fsdp2", "fsdp1")),
    ("ddp", "16-mixed", "gradient"), ("fsdp2", "16-mixed", "loss"), ("fsdp2", "bf16-mixed", "infinite loss"),
]  # fmt: skip


@pytest.mark.parametrize(("host", "mode", "how"), CASES)
def test_both_skip_name_the_guilty_and_save_its_batch(
    ranks: Ranks, folder: Path, host: str, mode: str, how: str
) -> None:
    guarded, ordinary = Guarded(host, mode, how, folder), mode == "16-mixed" and how == "gradient"
    one, other = ranks.run(guarded)
    assert one["events"] == other["events"]
    (event,), (module, _, bad_loss) = one["events"], FAULTS[how]
    assert (event["rank"], event["module"], event["step"]) == (GUILTY, module, BAD)
    assert event["kind"] == ("nonfinite_loss" if bad_loss else "nonfinite_grad")
    assert event["severity"] == ("info" if ordinary else "warning")
    assert one["counts"] == other["counts"] == (1, 7)
    for result in (one, other):
        # another scale rounds fp16 otherwise
        assert same(result["weights"], result["clean"], of_training(mode, 1e-3) if mode == "16-mixed" else 0.0)
    files = other["files"]
    assert files == ([] if ordinary else [f"step_000003_rank{GUILTY}.pt"])
    if files:
        saved = torch.load(guarded.run_dir / "nonfinite" / files[-1], weights_only=True)
        assert (saved["rank"], saved["batch_idx"]) == (GUILTY, BAD)


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_the_budget_stops_every_rank_with_the_same_error(ranks: Ranks, folder: Path, host: str) -> None:
    one, other = ranks.run(Guarded(host, "32-true", "loss", folder, (3, 4, 5), {"max_consecutive": 2}))
    assert one["error"] == other["error"] == (GUILTY, 5, "net.4")


@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_in_a_window_of_four_the_bad_batch_is_named(ranks: Ranks, folder: Path, host: str) -> None:
    windows = {"accumulate_grad_batches": 4}
    one, other = ranks.run(Guarded(host, "32-true", "batch", folder, (5,), options=windows))
    assert one["counts"] == other["counts"] == (1, 1)
    (event,) = one["events"]
    assert (event["rank"], event["module"], event["evidence"]["batch_idx"]) == (GUILTY, "net.0", 5)


@pytest.mark.parametrize(
    ("host", "planned"), [*((host, False) for host in ("ddp", "fsdp2", "fsdp1")), *((host, True) for host in HOSTS)]
)
def test_a_rewind_brings_every_rank_back(ranks: Ranks, tmp_path: Path, host: str, planned: bool) -> None:
    for result in ranks.run(Rewound(host, tmp_path, planned)):
        kept = result["kept"]
        assert result["events"] == ["rewind"]
        assert result["batches"] == 8
        assert same_weights(kept[6], kept[4])
        assert not same_weights(kept[5], kept[4])
        assert not same_weights(kept[8], kept[6])
        assert result["files"] == ["step_000005_rank1.pt"]


def test_stock_deepspeed_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.call(under_deepspeed, tmp_path):
        assert "with strategy='mp_deepspeed_zero1', 2 or 3" in said


def test_a_folder_that_cannot_be_opened_ends_every_rank_with_its_cause(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in ranks.call(no_folder, tmp_path / "file" / "run"):
        assert "the run's folder cannot be opened" in said.lower()
        assert str(tmp_path / "file") in said


REPLAYED = ("ddp", "fsdp2", "fsdp1", "deepspeed_zero1", "deepspeed_zero3")
REPLAYS: dict[str, Replayed] = {
    **{f"{name} gradient": Replayed(name, "16-mixed", "gradient") for name in REPLAYED},
    "ddp batch": Replayed("ddp", "16-mixed", "batch"),
    "zero3 infinite loss": Replayed("deepspeed_zero3", "16-mixed", "infinite loss"),
    "fsdp2 bf16-mixed": Replayed("fsdp2", "bf16-mixed", "gradient"),
}


@pytest.mark.parametrize("key", REPLAYS)
def test_the_guilty_rank_is_named_everywhere_and_only_for_the_bad_batch(ranks: Ranks, key: str) -> None:
    case = REPLAYS[key]
    one, other = ranks.run(case)
    assert one["diagnoses"] == other["diagnoses"]
    assert one["batches"][BAD] == other["batches"][BAD] == BAD
    module, _, bad_loss = FAULTS[case.how]
    bad: tuple[Any, ...] = (GUILTY, module, bad_loss)
    if case.strategy.startswith("deepspeed") and not bad_loss:  # backward is the engine's alone
        bad = (None, None, False)
    assert one["diagnoses"][BAD] == bad
    healthy = [diagnosis for batch, diagnosis in enumerate(one["diagnoses"]) if batch != BAD]
    assert {diagnosis[1:] for diagnosis in healthy} == {(None, False)}
    for result in (one, other):  # and it is the same run as without a replay
        assert same_weights(result["asked"], result["plain"])
