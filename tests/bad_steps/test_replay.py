"""A batch is run again under hooks: the module, the pass and the batch are named, and nobody can tell it was run."""

import random
import tempfile
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.plan.diagnosis import Diagnosis
from support.cells import sampled
from support.models import same_weights
from support.nonfinite import BAD, STOCK, Breaks, Remembers
from support.oracles import stock_for
from support.running import fit


class Asks(Callback):
    def __init__(self, *at: int, when: str = "step") -> None:
        self.replayer, self.at, self.when = Replayer(), at, when
        self.diagnoses: list[Diagnosis] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.replayer.remember(trainer, batch, batch_idx)
        self.batch_idx = batch_idx

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._ask("step", trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self._ask("end", trainer, pl_module)

    def _ask(self, when: str, trainer: Trainer, pl_module: LightningModule) -> None:
        if when == self.when and self.batch_idx in self.at:
            self.diagnoses.append(self.replayer.locate(trainer))


def _asked(module: LightningModule, *at: int, when: str = "step", **options: Any) -> Diagnosis:
    asks = Asks(*(at or (BAD,)), when=when)
    fit(module, callbacks=[asks], **options)
    return asks.diagnoses[0]


def test_a_window_is_gone_after_its_step() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Counts(Asks):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(weakref.ref(args[3][0]))
            alive.append(sum(one() is not None for one in seen))
            if len(seen) % 4 == 0:
                self.replayer.forget()

    fit(Breaks("gradient", ()), callbacks=[Counts(when="never")], accumulate_grad_batches=4)
    assert max(alive) <= 5, alive  # and what the loop has fetched


def test_a_replay_that_fails_says_so_and_looks_at_the_gradients() -> None:
    class Fails(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0], next(batch[1])), batch_idx)

    data = [(torch.ones(4, 16), iter([torch.ones(4, 1)])) for _ in range(5)]  # used up
    diagnosis = _asked(Fails("gradient"), data=DataLoader(data, batch_size=None))
    assert "the replay of batch 3 failed" in str(diagnosis.note)
    assert diagnosis.origin is not None
    assert diagnosis.origin.phase == "backward"


class Trace(Callback):
    """Everything a replay could have touched, after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters()}
        self.seen.append(
            {"gradients": {n: None if g is None else g.nan_to_num().clone() for n, g in gradients.items()}}
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        self.seen.append(
            {
                "buffers": {name: buffer.clone() for name, buffer in pl_module.named_buffers()},
                "mode": [module.training for module in pl_module.modules()],
                "numbers": torch.tensor([pl_module.steps, *pl_module.drawn, pl_module.average, *pl_module.losses]),
                "mean": pl_module.mean.compute().clone(),
                "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
                "hooks": [(len(m._forward_hooks), len(vars(m))) for m in pl_module.modules()],
                "step": trainer.global_step,
                "rng": torch.get_rng_state(),
            }
        )


@pytest.mark.parametrize(("mode", "when", "accumulate"), sampled(STOCK, ["step", "end"], [1, 2]))
def test_a_replay_leaves_no_trace(mode: str, when: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2, **stock_for(mode)}
    asked, plain, traces = Remembers("gradient"), Remembers("gradient"), (Trace(), Trace())
    asks = Asks(*range(8), when=when)
    seed_everything(1, verbose=False)
    first = fit(asked, callbacks=[asks, traces[0]], **options)
    seed_everything(1, verbose=False)
    second = fit(plain, callbacks=[traces[1]], **options)
    assert len(asks.diagnoses) >= 8
    assert first.logged_metrics.keys() == second.logged_metrics.keys()
    torch.testing.assert_close(traces[0].seen, traces[1].seen, rtol=0, atol=0, equal_nan=True)


class Meter:
    """A running mean as projects write it themselves."""

    def __init__(self) -> None:
        self.total, self.count, self.values = 0.0, 0, list[float]()

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.values.append(value)


def _expanded() -> tuple[Any, Callable[[Any], Any]]:
    return torch.zeros(1).expand(4), lambda kept: None


def _expanded_and_written() -> tuple[Any, Callable[[Any], Any]]:
    return torch.zeros(3, 1).expand(3, 4), lambda kept: kept[:, 0].add_(1)


def _windows() -> tuple[Any, Callable[[Any], Any]]:
    return torch.zeros(6).unfold(0, 4, 1), lambda kept: kept[1].add_(1)


def _read_only() -> tuple[Any, Callable[[Any], Any]]:
    with tempfile.TemporaryFile() as file:
        np.full(4, np.nan, dtype=np.float32).tofile(file)
        file.seek(0)
        mapped = np.memmap(file, dtype=np.float32, mode="r")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(mapped), lambda kept: None


def _numpy_generator() -> tuple[Any, Callable[[Any], Any]]:
    return np.random.default_rng(3), lambda kept: kept.random()


#: how a module may remember what it did -> an attribute, and what training_step does with it
MEMORIES: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "expanded": _expanded,
    "expanded, written": _expanded_and_written,
    "windows": _windows,
    "read-only": _read_only,
    "sparse": lambda: (torch.eye(3).to_sparse(), lambda kept: None),
    "complex": lambda: (torch.zeros(3, dtype=torch.complex64).conj(), lambda kept: kept.add_(1j)),
    "numpy array": lambda: (np.zeros(3), lambda kept: np.add(kept, 1, out=kept)),
    "deque": lambda: (deque(maxlen=100), lambda kept: kept.append(1.0)),
    "counter": lambda: (Counter(), lambda kept: kept.update("a")),
    "defaultdict": lambda: (defaultdict(list), lambda kept: kept["losses"].append(1.0)),
    "tensors in a list": lambda: ([torch.zeros(2)], lambda kept: kept[0].add_(1)),
    "torch generator": lambda: (torch.Generator().manual_seed(3), lambda kept: torch.rand(3, generator=kept)),
    "numpy generator": _numpy_generator,
    "python generator": lambda: (random.Random(3), lambda kept: kept.random()),
    "object": lambda: (Meter(), lambda kept: kept.update(1.0)),
}


class RemembersIn(Breaks):
    """Remembers each step in the way ``how``, and logs."""

    def __init__(self, how: str, bad: tuple[int, ...] = (BAD,)) -> None:
        super().__init__("gradient", bad)
        self.kept, self.remember = MEMORIES[how]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.remember(self.kept)
        loss = super().training_step(batch, batch_idx)
        self.log("batch", float(batch_idx))
        return loss


def _in_words(value: Any) -> str:
    """The state of a memory, in words."""
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return str(value.getstate())
    return str(vars(value)) if isinstance(value, Meter) else str(value)


@pytest.mark.parametrize("how", MEMORIES)
def test_a_module_remembers_each_batch_once(how: str) -> None:
    asked, plain, asks = RemembersIn(how), RemembersIn(how), Asks(BAD)
    first, second = fit(asked, callbacks=[asks]), fit(plain)
    assert asks.diagnoses[0].module == "net.2"
    assert asks.diagnoses[0].note is None
    assert _in_words(asked.kept) == _in_words(plain.kept)
    assert first.callback_metrics == second.callback_metrics == {"batch": torch.tensor(7.0)}


class Teaches(Breaks):
    """Its teacher moves in ``training_step``, as in most code of MoCo and BYOL, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__("gradient")
        self.moves, self.teacher = how, nn.Linear(4, 4).requires_grad_(False)
        for parameter in self.teacher.parameters():
            nn.init.zeros_(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.teacher.parameters():
            if self.moves == "assigned":
                parameter.data = parameter.data * 0.5 + 1
            elif self.moves == "data":
                parameter.data.mul_(0.5).add_(1)
            else:
                with torch.no_grad():
                    parameter.lerp_(torch.full_like(parameter, 2), 0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("how", ["assigned", "data", "in place"])
def test_a_teacher_moves_once_a_batch(how: str) -> None:
    asked, plain = Teaches(how), Teaches(how)
    pointers = [parameter.data_ptr() for parameter in asked.teacher.parameters()]
    assert _asked(asked).module == "net.2"
    fit(plain)
    assert same_weights(asked.teacher.state_dict(), plain.teacher.state_dict())
    assert (pointers == [parameter.data_ptr() for parameter in asked.teacher.parameters()]) == (how != "assigned")


class Stubborn(list[float]):
    """A list that does not let go."""

    def clear(self) -> None:
        raise TypeError("this list only grows")


def test_what_cannot_be_undone_is_said_and_all_else_is_undone() -> None:
    class Grows(Remembers):
        def __init__(self) -> None:
            super().__init__("gradient")
            self.grows = Stubborn()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.grows.append(1.0)
            return super().training_step(batch, batch_idx)

    asked, plain, traces, asks = Grows(), Grows(), (Trace(), Trace()), Asks(BAD)
    seed_everything(1, verbose=False)
    with pytest.warns(
        UserWarning, match="batch 3 again changed something that could not be undone: TypeError: this list"
    ):
        fit(asked, callbacks=[asks, traces[0]])
    seed_everything(1, verbose=False)
    fit(plain, callbacks=[traces[1]])
    assert asks.diagnoses[0].module == "net.2"
    assert len(asked.grows) == len(plain.grows) + 1
    torch.testing.assert_close(traces[0].seen, traces[1].seen, rtol=0, atol=0, equal_nan=True)
