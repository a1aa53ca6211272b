"""What hooks and callbacks do with a sharded model between steps: as under DDP, or refused."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from support import hf
from support.comparing import of_training, same_runs
from support.models import FEATURES, HIDDEN, batches, same_weights
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import trainer
from support.sharded import HOSTS, RATE, WAIT, Language, Ranked, _ours, ddp, refused, trained

pytestmark = pytest.mark.gloo
MODES = ("32-true", "bf16-mixed", "16-mixed")
STRATEGIES: dict[str, Callable[..., dict[str, Any]]] = {
    "fsdp2": partial(HOSTS["fsdp2"], wrap="Block"),
    "hsdp": partial(_ours, "hsdp", wrap="Block", device_mesh=(1, 2), **WAIT),
    "offload": partial(HOSTS["fsdp2"], wrap="Block", cpu_offload=True),
    "zero2_half": partial(_ours, "deepspeed_zero2_half", timeout=WAIT["timeout"]),
    "by size": partial(HOSTS["fsdp2"], wrap=None),
    "offload by size": partial(HOSTS["fsdp2"], wrap=None, cpu_offload=True),
    "compiled": partial(HOSTS["fsdp2"], wrap="Block", compile=True),
    "compiled whole blocks": partial(HOSTS["fsdp2"], wrap="Block", compile=True, reshard_after_forward=False),
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


def follow(teacher: nn.Module, student: nn.Module) -> None:
    """MoCo's momentum update, as it is mostly written."""
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.data = k.data * 0.5 + q.data * 0.5


def follow_in_place(teacher: nn.Module, student: nn.Module) -> None:
    for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
        k.data.mul_(0.5).add_(q.data, alpha=0.5)


def project(_teacher: nn.Module, student: Any) -> None:
    """Rows, and columns, of length 1."""
    student.embed.weight.data = nn.functional.normalize(student.embed.weight.data, dim=1)
    student.blocks[0].up.weight.data = nn.functional.normalize(student.blocks[0].up.weight.data, dim=0)


def clip(_teacher: nn.Module, student: nn.Module) -> None:
    """A Wasserstein GAN's."""
    for p in student.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def set_whole(teacher: nn.Module, student: nn.Module) -> None:
    """All weights from one vector."""
    count = sum(p.numel() for p in teacher.parameters())
    nn.utils.vector_to_parameters(torch.linspace(-0.1, 0.1, count), teacher.parameters())
    student.head.bias.data = torch.full((1,), 0.25)


WAYS_TO_WRITE = {one.__name__: one for one in (project, follow, follow_in_place, clip, set_whole)}
#: those that leave the trained weights alone, which may be written to before the backward pass, too
OF_TEACHERS = ("follow", "follow_in_place")


class Taught(Looking):
    """A student that learns from a frozen teacher, which follows it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.teacher, self.way = copy.deepcopy(self.net), way
        for parameter in self.teacher.parameters():
            parameter.data.mul_(0.5)
            parameter.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0] * self.factor()
        taught = (self.net(x).float() - self.teacher(x).float()).pow(2).mean()
        return taught + super().loss(batch)

    def write(self) -> None:
        WAYS_TO_WRITE[self.way](self.teacher, self.net)


class WritesInAHook(Taught):
    def on_train_batch_end(self, *_: Any) -> None:
        self.write()


class WritesBeforeTheStep(Taught):
    """After a forward pass in the hook, too."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()
        self.write()


class WritesInTheStep(Taught):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write()
        return super().training_step(batch, batch_idx)


class WritesByHand(Taught):
    """Manual optimization; the weights are written to after the optimizer's step."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.write()


class UnitLinear(nn.Linear):
    """Keeps its rows at length 1 in each forward pass in training, as some diffusion models do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(nn.functional.normalize(self.weight, dim=1))
        return nn.functional.linear(x, self.weight, self.bias)


class WritesInItsForward(Looking):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net.embed = UnitLinear(FEATURES, HIDDEN)
            cast("Any", self.net.blocks[0]).up = UnitLinear(HIDDEN, 3 * HIDDEN)


def clear(module: Any) -> None:
    module.zero_grad()


def clear_to_zeros(module: Any) -> None:
    module.net.zero_grad(set_to_none=False)


def clear_each(module: Any) -> None:
    for parameter in module.net.parameters():
        parameter.grad = None


def halve_each(module: Any) -> None:
    """As gradients of older batches are weighed less."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def assign_half(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


WAYS_TO_CHANGE_GRADIENTS = {one.__name__: one for one in (clear, clear_to_zeros, clear_each, halve_each, assign_half)}


class ChangesGradients(Looking):
    """Manual optimization; gradients of the last step are changed after the next forward pass, and nowhere cleared."""

    def __init__(self, way: str, first: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way, self.first = way, first

    def training_step(self, batch: Any, batch_idx: int) -> None:
        change = WAYS_TO_CHANGE_GRADIENTS[self.way]
        optimizer: Any = self.optimizers()
        if self.first:
            change(self)
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if not self.first:
            change(self)
        self.manual_backward(loss)
        optimizer.step()


class ClearsInTheStep(Looking):
    """Automatic optimization; the step drops what was accumulated before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        return loss


class WritesInACallback(Callback):
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.write()


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
    _equal(ranks, Compared(mode, Writes, ("by size",), data=hf.token_batches))


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_what_is_assigned_to_a_weight_is_kept(ranks: Ranks, way: str) -> None:
    mode = MODES[list(WAYS_TO_WRITE).index(way) % len(MODES)]
    _equal(ranks, Compared(mode, partial(WritesInAHook, way), OF_BLOCKS))
    _equal(ranks, Compared(mode, partial(WritesBeforeTheStep, way)))
    _equal(ranks, Compared(mode, partial(WritesByHand, way)))
    if way in OF_TEACHERS:
        _equal(ranks, Compared(mode, partial(Taught, way), callback=WritesInACallback))
    _equal(ranks, Compared("32-true", partial(WritesInTheStep, way), ("by size", "offload by size")))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_module_writes_to_its_weight_in_its_forward_is_kept(ranks: Ranks, mode: str) -> None:
    _equal(ranks, Compared(mode, WritesInItsForward, OF_BLOCKS))


@pytest.mark.parametrize("way", WAYS_TO_CHANGE_GRADIENTS)
def test_gradients_that_a_step_clears_or_changes_are_those_of_the_shards(ranks: Ranks, way: str) -> None:
    mode = MODES[list(WAYS_TO_CHANGE_GRADIENTS).index(way) % len(MODES)]
    _equal(ranks, Compared(mode, partial(ChangesGradients, way), ("fsdp2", "whole blocks")))
    _equal(ranks, Compared(mode, partial(ChangesGradients, way, first=True), ("by size",)))
    if way == "clear":
        _equal(ranks, Compared("16-mixed", ClearsInTheStep, ("hsdp", "offload"), accumulate=2))


class TracedInEachStep(ChangesGradients):
    """``torch.compile`` traces while there are gradients, as in an accumulation window for a new shape."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        torch.compiler.reset()
        super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_gradients_that_a_step_of_a_compiled_model_changes_are_those_of_the_shards(ranks: Ranks) -> None:
    _equal(ranks, Compared("32-true", partial(ChangesGradients, "clear"), ("compiled",)))
    _equal(ranks, Compared("32-true", partial(TracedInEachStep, "halve_each"), ("compiled whole blocks",)))


class Follows(Taught):
    """Writes what it is given, once, in a hook."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__("follow")
        self.write_once = write

    def on_train_batch_end(self, *_: Any) -> None:
        self.write_once(self)


def _to_half(module: Any) -> None:
    module.net.head.weight.data = module.net.head.weight.data.half()


def _to_another_shape(module: Any) -> None:
    module.net.embed.weight.data = torch.zeros(HIDDEN + 1, FEATURES)


def _to_anothers(module: Any) -> None:
    module.teacher.blocks[1].up.weight.data = module.net.blocks[1].up.weight.data


def _to_a_new_parameter(module: Any) -> None:
    module.net.blocks[0].up.bias = nn.Parameter(torch.zeros(3 * HIDDEN))


#: what a hook does, and what the refusal says
CANNOT_BE_KEPT: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "another dtype": (_to_half, ("net.head.weight.data", "float16", "value.to(weight.dtype)")),
    "another shape": (_to_another_shape, ("net.embed.weight.data", "(33, 16)", "(32, 16)")),
    "another weight's data": (_to_anothers, ("teacher.blocks.1.up.weight.data", "another weight", "value.clone()")),
    "a new parameter": (_to_a_new_parameter, ("'net.blocks.0.up.bias' replaced", "weight.data.copy_(value)")),
}


def refused_writes() -> dict[str, str]:
    """What is said to each, and to a teacher that follows in a step in which its weights are halves."""
    said: dict[str, str] = {}
    for name, (write, _) in CANNOT_BE_KEPT.items():
        said[name] = refused(lambda write=write: trained("32-true", STRATEGIES["fsdp2"](), Follows(write)))
        dist.barrier()
    steps = {"follow": "bf16-mixed", "set_whole": "16-mixed"}
    for way, mode in steps.items():
        said[way] = refused(lambda way=way, mode=mode: trained(mode, STRATEGIES["by size"](), WritesInTheStep(way)))
        dist.barrier()
    return said


def test_what_a_shard_cannot_take_is_refused_by_its_name(ranks: Ranks) -> None:
    for said in ranks.call(refused_writes):
        for name, (_, words) in CANNOT_BE_KEPT.items():
            assert all(word in said[name] for word in words), said[name]
        for way, dtype in (("follow", "bf16"), ("set_whole", "fp16")):
            told = (f"teacher.embed.weight is {dtype} in a step", "on_train_batch_end", "test_between_steps_gloo.py")
            assert all(word in said[way] for word in told), said[way]


class AveragesInBuffers(Looking):
    """Averages weights in buffers that it made before weights were sharded, as CompVis' LitEma does."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.register_buffer("average", self.net.blocks[0].up.weight.detach().clone())  # type: ignore[union-attr]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.hook == "on_train_batch_end":
            weight: Any = self.net.blocks[0].up.weight  # type: ignore[union-attr]
            with torch.no_grad():
                self.average.sub_(0.1 * (self.average - weight))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.hook == "validation_step":
            self.net.blocks[0].up.weight.data.copy_(self.average)  # type: ignore[union-attr]


class AveragesInShards(Looking):
    """What is said to write instead."""

    def on_fit_start(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.net.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for average, weight in zip(self.averages, self.net.parameters(), strict=True):
                average.sub_(0.1 * (average - weight))
                weight.data.copy_(average)


def mixed_with_plain(mode: str, hook: str) -> str:
    """What torch's error says, with what is added to it."""
    module, plan = AveragesInBuffers(hook), plan_for(mode)
    run = trainer(plugins=[plan], **STRATEGIES["fsdp2"]())
    try:
        run.fit(module, batches(), val_dataloaders=batches())
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


@pytest.mark.parametrize("mode", MODES)
def test_torchs_error_about_a_shard_and_a_plain_tensor_says_what_to_write(ranks: Ranks, mode: str) -> None:
    for hook in ("on_train_batch_end", "validation_step"):
        for said in ranks.call(mixed_with_plain, mode, hook):
            assert "sharded weights and plain tensors together. Make averages" in said, said
            assert "on_fit_start" in said
    _equal(ranks, Compared(mode, AveragesInShards))


class SamplesInHalf(Samples):
    """Also writes down in which dtype a hook gets what the model returns."""

    def look(self) -> None:
        super().look()
        with torch.no_grad():
            assert self.net(self.inputs()).dtype == torch.float32


def test_a_forward_in_a_hook_works_on_zeros_half_weights(ranks: Ranks) -> None:
    case = Compared("bf16-mixed", SamplesInHalf, ("zero2_half",))
    for result in ranks.run(case):
        expected, sampled = (torch.tensor(result[name]["validated"]) for name in ("ddp", "zero2_half"))
        # sums of four outputs, of weights that are rounded to bf16, over eight steps
        assert torch.allclose(sampled, expected, rtol=2**-4, atol=2**-4)
