"""What hooks and callbacks do with a sharded model between steps: as under DDP, or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from support import hf
from support.comparing import of_training, same_runs
from support.models import FEATURES, HIDDEN, same_weights
from support.ranks import Ranks
from support.sharded import HOSTS, RATE, WAIT, Language, Ranked, _ours, ddp, trained

pytestmark = pytest.mark.gloo
MODES = ("32-true", "bf16-mixed", "16-mixed")
STRATEGIES: dict[str, Callable[..., dict[str, Any]]] = {
    "fsdp2": partial(HOSTS["fsdp2"], wrap="Block"),
    "hsdp": partial(_ours, "hsdp", wrap="Block", device_mesh=(1, 2), **WAIT),
    "offload": partial(HOSTS["fsdp2"], wrap="Block", cpu_offload=True),
    "by default": partial(HOSTS["fsdp2"], wrap=None),
    "whole blocks": partial(HOSTS["fsdp2"], wrap="Block", reshard_after_forward=False),
}
OF_BLOCKS = ("fsdp2", "hsdp", "offload", "whole blocks")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Network(nn.Module):
    """Two blocks, which are units; the embedding, the norm and the head are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Looking(Ranked):
    """Writes down what the model makes of fixed inputs, whenever :meth:`look` is called."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer=optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Network()
        self.validated: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def inputs(self) -> Tensor:
        return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1)) * self.factor()

    @torch.no_grad()
    def look(self) -> None:
        self.validated.append(self(self.inputs()).float().sum().item())


class LooksBeforeTheStep(Looking):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


class LooksWithGradients(Looking):
    def on_after_backward(self) -> None:
        self.validated.append(self(self.inputs()).float().sum().item())


class LooksByHand(Looking):
    """Manual optimization: one forward pass between ``manual_backward`` and the step, and a step after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.look()
            optimizer.step()
            optimizer.zero_grad()


def look_now(module: Any, *_: Any) -> None:
    """A hook that looks."""
    module.look()


class Samples(Looking):
    """Looks in every hook that samples are logged in; the model is called, not the module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def look(self) -> None:
        with torch.no_grad():
            hidden = self.net.blocks[0](self.net.embed(self.inputs()))
            called = self.net(self.inputs()), self(self.inputs()), self.net.head(self.net.norm(hidden))
            with torch.autocast("cpu", torch.bfloat16):
                called += (self.net(self.inputs()),)
        self.validated += [out.float().sum().item() for out in called]

    def on_fit_start(self) -> None:
        self.look()

    on_train_start = on_train_epoch_start = on_before_zero_grad = on_before_backward = on_after_backward = look_now
    on_validation_epoch_end = on_train_epoch_end = on_train_end = on_fit_end = look_now


class TwoLosses(Looking):
    """Adds the gradients of a second loss, which a hook takes of the model itself: the same on every rank."""

    def on_after_backward(self) -> None:
        loss = self.net(self.inputs() / self.factor()).float().pow(2).mean()
        self.validated.append(loss.item())
        scaler: Any = cast("Any", self.trainer.precision_plugin).scaler
        (loss * (1.0 if scaler is None else scaler.get_scale())).backward()


class Writes(Language):
    """Writes down what a Llama goes on with after a prompt: before the first step, after each, and at the end."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.validated: list[list[int]] = []

    def look(self) -> None:
        prompt = torch.arange(1, 4).unsqueeze(0)
        self.model.eval()
        written: Any = cast("Any", self.model).generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        self.model.train()
        self.validated.append(written[0].tolist())

    on_train_start = on_train_batch_end = on_train_epoch_end = on_fit_end = look_now


class LooksInACallback(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.look()


@dataclass(frozen=True)
class Compared:
    """A module's run under DDP, and the same under each of the named strategies."""

    mode: str
    module: Callable[[], LightningModule]
    strategies: tuple[str, ...] = ("fsdp2",)
    callback: Callable[[], Callback] | None = None
    accumulate: int = 1
    data: Callable[[], Any] | None = None

    def run(self) -> dict[str, Any]:
        hosts: dict[str, Any] = {"ddp": partial(ddp, find_unused_parameters=True)}
        hosts |= {name: STRATEGIES[name] for name in self.strategies}
        return {name: self._run(host) for name, host in hosts.items()}

    def _run(self, host: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        callbacks = [] if self.callback is None else [self.callback()]
        options: dict[str, Any] = {"callbacks": callbacks, "accumulate_grad_batches": self.accumulate}
        if self.data is not None:
            options["data"] = self.data()
        return trained(self.mode, host(), self.module(), **options)


def _equal(ranks: Ranks, case: Compared) -> None:
    results = ranks.run(case)
    for result in results:
        for name in case.strategies:
            assert same_runs(result["ddp"], result[name], of_training(case.mode, RATE)), (name, result)
    for name in case.strategies:
        assert same_weights(*(result[name]["weights"] for result in results))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_between_backward_and_the_step_leaves_no_stale_weights(ranks: Ranks, mode: str) -> None:
    _equal(ranks, Compared(mode, LooksBeforeTheStep, OF_BLOCKS))
    _equal(ranks, Compared(mode, LooksWithGradients, accumulate=2))
    _equal(ranks, Compared(mode, LooksByHand, OF_BLOCKS))
    _equal(ranks, Compared(mode, Looking, callback=LooksInACallback))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_in_a_hook_is_as_under_ddp(ranks: Ranks, mode: str) -> None:
    _equal(ranks, Compared(mode, Samples, OF_BLOCKS))
    _equal(ranks, Compared(mode, TwoLosses, ("fsdp2", "offload")))


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_generates_in_hooks_as_under_ddp(ranks: Ranks, mode: str) -> None:
    _equal(ranks, Compared(mode, Writes, ("by default",), data=hf.token_batches))
