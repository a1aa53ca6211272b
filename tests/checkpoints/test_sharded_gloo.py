"""Sharded and DeepSpeed checkpoints of two real processes, read by one: they hold what the ranks held."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan
from lightning_mp.checkpoints import CheckpointFormatError, kind_of, read_full
from support.comparing import same
from support.models import Regression, batches, same_weights
from support.ranks import RankError, Ranks
from support.running import trainer
from support.saved import RECORDED, SILENT, Held, Kept
from support.sharded import HOSTS, rank, whole

pytestmark = pytest.mark.gloo
SHARDED = ("fsdp2", "fsdp1")
ZERO = tuple(f"zero{stage}" for stage in range(4))
ZERO_BF16 = tuple(f"zero{stage} bf16" for stage in (1, 2, 3))


class Saved:
    """The runs under each host, made when first asked for; DeepSpeed compiles its CPU collectives on its first."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def held(self, host: str) -> list[dict[str, Any]]:
        return self.ranks.run(Kept(host, self.folder))

    def path(self, host: str, step: int = RECORDED) -> Path:
        self.held(host)
        return Kept(host, self.folder).path(step)

    def copy(self, host: str, folder: Path) -> Path:
        return Path(shutil.copytree(self.path(host), folder / "copy.ckpt"))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(ranks, tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize("host", [*SHARDED, *ZERO, *ZERO_BF16])
def test_the_weights_are_those_the_ranks_held(saved: Saved, host: str) -> None:
    """Tied, frozen and odd-sized ones, and buffers; in this process, and by each rank beside the others."""
    one, other = saved.held(host)
    assert same_weights(one["weights"][RECORDED], other["weights"][RECORDED])
    assert one["weights"][RECORDED].keys() == Held().state_dict().keys()
    for read in (read_full(saved.path(host))["state_dict"], one["read"], other["read"]):
        assert same_weights(read, one["weights"][RECORDED])
        assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in read.values())
        Held().load_state_dict(read, strict=True)


@pytest.mark.parametrize("host", ZERO_BF16)
def test_without_a_record_they_are_the_fp32_masters(saved: Saved, host: str) -> None:
    """Rounded, they are what the ranks held; where a record says bf16, they come rounded."""
    held = saved.held(host)[0]["weights"][SILENT]
    read = read_full(saved.path(host, SILENT))["state_dict"]
    assert same_weights({name: tensor.to(held[name].dtype) for name, tensor in read.items()}, held)
    assert read["model.first.weight"].dtype == torch.float32
    assert not torch.equal(read["model.first.weight"], held["model.first.weight"].float())
    assert read["model.mean"].dtype == held["model.mean"].dtype == torch.bfloat16


@pytest.mark.parametrize("host", [*SHARDED, *ZERO])
def test_all_else_is_as_lightning_saved_it(saved: Saved, host: str, capfd: Any) -> None:
    path = saved.path(host)
    capfd.readouterr()
    full = read_full(path)
    assert capfd.readouterr() == ("", "")  # DeepSpeed's own tool prints
    assert kind_of(path) == ("deepspeed" if host in ZERO else "sharded")
    own = {"state_dict", "optimizer_states", "lightning_mp"}
    left_out = {"optimizer_left_out"} if host in ZERO else set()
    lightnings = {"epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers"}
    assert full.keys() == own | left_out | lightnings
    assert full["global_step"] == RECORDED
    assert full["lr_schedulers"][0]["last_epoch"] == RECORDED
    assert full["lightning_mp"]["strategy"] == "test"
    assert host not in ZERO or (full["optimizer_states"] == [] and "DeepSpeed" in full["optimizer_left_out"])


@pytest.mark.parametrize("host", SHARDED)
def test_optimizer_states_load_into_a_plain_optimizer(saved: Saved, host: str) -> None:
    moments = saved.held(host)[0]["moments"][RECORDED]
    module = Held()
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    (states,) = read_full(saved.path(host))["optimizer_states"]
    assert [group["params"] for group in states["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6]]
    optimizer.load_state_dict(states)
    held = {name: optimizer.state[p] for name, p in module.named_parameters() if p in optimizer.state}
    assert same(held, moments)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**RECORDED)


@pytest.mark.parametrize(
    ("host", "lost", "says"),
    [
        ("fsdp2", ".metadata", "not all of one"),
        ("fsdp2", "__1_0.distcp", "it lacks __1_0.distcp"),
        ("zero0", "checkpoint/mp_rank_00_model_states.pt", "has no file *_model_states.pt"),
        ("zero1", "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt", "cannot be read: Expected 2"),
        ("zero3", "checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt", "it lacks the model states of rank 0"),
    ],
)
def test_an_incomplete_one_says_what_is_missing(saved: Saved, tmp_path: Path, host: str, lost: str, says: str) -> None:
    copy = saved.copy(host, tmp_path)
    (copy / lost).unlink()
    with pytest.raises(CheckpointFormatError, match=re.escape(says)):
        read_full(copy)


CUT = {
    "fsdp2": (".metadata", "__0_0.distcp"),
    "fsdp1": ("meta.pt",),
    "zero2": ("checkpoint/mp_rank_00_model_states.pt",),
    "zero3": tuple(f"checkpoint/zero_pp_rank_{end}_states.pt" for end in ("1_mp_rank_00_model", "0_mp_rank_00_optim")),
}


@pytest.mark.parametrize(("host", "cut"), [(host, file) for host, files in CUT.items() for file in files])
def test_a_file_cut_short_is_named_in_one_line(saved: Saved, tmp_path: Path, host: str, cut: str) -> None:
    copy = saved.copy(host, tmp_path)
    whole = (copy / cut).read_bytes()
    (copy / cut).write_bytes(whole[: len(whole) // 3])
    with pytest.raises(CheckpointFormatError) as caught:
        read_full(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


#: which file of a checkpoint, of those that rank 0 opens to write, it does not come to the end of
FILES = {"fsdp2": 2, "zero2": 2, "zero3": 1}
EACH = ["fsdp2", *(pytest.param(host, marks=pytest.mark.slow) for host in ("zero2", "zero3"))]


def save(host: str, steps: int, path: str, file: int | None = None) -> dict[str, Any]:
    fitted = trainer(plugins=[MixedPrecisionPlan("32-true")], max_steps=steps, **HOSTS[host]())
    module = Regression(torch.optim.AdamW)
    fitted.fit(module, batches())
    if rank() == 0 and file is not None:
        sys.addaudithook(Killer(file))
    fitted.save_checkpoint(path)
    return whole(module)


class Killer:
    def __init__(self, file: int) -> None:
        self.left = file

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and any(letter in str(arguments[1]) for letter in "wxa+"):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("host", EACH)
def test_what_was_there_is_still_there(host: str, ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    ranks.call(save, host, 2, str(path))
    before = read_full(path, weights_only=False)
    with pytest.raises(RankError, match="exit code -9"):
        ranks.call(save, host, 4, str(path), FILES[host])
    after = read_full(path, weights_only=False)
    assert after["global_step"] == before["global_step"] == 2
    assert same(before["state_dict"], after["state_dict"])
    assert same(before["optimizer_states"], after["optimizer_states"])
