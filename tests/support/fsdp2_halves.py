"""What FSDP2 gathers in half precision: bytes that cross, copies that stay, and runs beside DDP's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support import hf
from support.models import FEATURES, batches
from support.oracles import plan_for
from support.running import fit
from support.sharded import OPTIMIZERS, Both, Ranked, ddp, fsdp2, refused, trained, whole

VOCABULARY, WIDTH, LAYERS = 251, 64, 3


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **quiet, bos_token_id=0, eos_token_id=0))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": _llama, "gpt2": _gpt2}


class Counted(LightningModule):
    """A transformers model that looks at what its graph keeps when a forward is over."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[kind]()
        self.losses: list[float] = []
        #: bytes of half-precision copies of block weights that wait for the backward pass
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = (batch + self.global_rank) % VOCABULARY
        blocks = [part for part in self.model.modules() if type(part).__name__.endswith(("DecoderLayer", "GPT2Block"))]
        sizes = {p.numel() for block in blocks for p in block.parameters() if p.dim() == 2}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.dtype.itemsize == 2 and tensor.numel() in sizes:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = hf.loss_of(self.model, ids)
        weights = [t for t in saved.values() if t.dim() == 2 and WIDTH in t.shape and ids.numel() not in t.shape]
        assert weights
        self.kept.append(sum(t.untyped_storage().nbytes() for t in weights))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"](self.parameters())


@contextmanager
def collectives() -> Iterator[dict[str, list[int]]]:
    """Bytes that FSDP2 gathers, and that its reductions take, call by call."""
    seen: dict[str, list[int]] = {"gathered": [], "reduced": []}
    names = {"all_gather": "gathered", "reduce_scatter": "reduced"}
    before: dict[str, Any] = {}
    for name in dir(dist):
        kind = name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
        if kind not in names or name == kind:
            continue
        before[name] = getattr(dist, name)

        def noting(*args: Any, _call: Any = before[name], _what: str = names[kind], **options: Any) -> Any:
            tensors = [item for item in (*args, *options.values()) if isinstance(item, Tensor)]
            seen[_what].append(max(tensor.nbytes for tensor in tensors))  # the whole, beside the rank's part of it
            return _call(*args, **options)

        setattr(dist, name, noting)
    try:
        yield seen
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


class _Steps(Callback):
    def __init__(self, seen: dict[str, list[int]]) -> None:
        self.seen = seen
        self.steps: list[dict[str, list[int]]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({key: list(found) for key, found in self.seen.items()})
        for found in self.seen.values():
            found.clear()


@dataclass(frozen=True)
class Bytes:
    """A model's run under FSDP2 and DDP, and what crossed in each step."""

    kind: str
    mode: str = "bf16-mixed"
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        ids = torch.randint(VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(3))
        data = DataLoader(ids, batch_size=2)  # type: ignore[arg-type]
        module = Counted(self.kind)
        with collectives() as seen:
            steps = _Steps(seen)
            host = fsdp2(wrap=None)
            sharded = trained(self.mode, host, module, data=data, callbacks=[steps], **self.options)
        other = trained(self.mode, ddp(), Counted(self.kind), data=data, **self.options)
        return {"sharded": sharded, "ddp": other, "steps": steps.steps, "kept": module.kept}


# ------------------------------------------------------------------ what a model may do with its weights


class Kinds(nn.Module):
    """Weights of sizes that two ranks do not divide: tied ones, one used twice, a convolution, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 17), nn.Linear(17, FEATURES)
        self.one, self.other = nn.Linear(17, 17, bias=False), nn.Linear(17, 17, bias=False)
        self.other.weight = self.one.weight
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.other(self.one(self.up(x).relu()).relu())
        x = self.norm(x + self.down(hidden + self.one(hidden)))
        x = x + self.conv(x.unsqueeze(1)).mean(1)
        rows = x.view(2, -1, FEATURES)
        return (rows + self.attention(rows, rows, rows, need_weights=False)[0]).view_as(x)


class Many(Ranked):
    """Two blocks of :class:`Kinds`, and a head."""

    def __init__(self, optimizer: str = "adamw", bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad, optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(Kinds(), Kinds(), nn.Linear(FEATURES, 1))


class Penalised(Many):
    """Reads a weight in the step."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net[2].weight.float().pow(2).sum()


class Lora(LightningModule):
    """A Llama with peft's adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.llama(lora=True)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = hf.loss_of(self.model, (batch + self.global_rank) % hf.VOCABULARY)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["adamw"]([p for p in self.parameters() if p.requires_grad])


@dataclass(frozen=True)
class Ignored:
    """One weight that FSDP2 leaves whole, which nothing trains."""

    def run(self) -> dict[str, Any]:
        def make() -> Ranked:
            module = Many()
            module.net[0].up.requires_grad_(False)
            return module

        module = make()
        ignored = set(module.net[0].up.parameters())
        return {
            "ddp": trained("bf16-mixed", ddp(), make()),
            "sharded": trained("bf16-mixed", fsdp2(wrap=Kinds, ignored_params=ignored), module),
            "whole": [name for name, p in module.named_parameters() if not hasattr(p, "to_local")],
        }


class _Assign(Callback):
    """After the second step, the state dict is loaded by assignment, doubled."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = pl_module.state_dict()
            assign = hasattr(next(pl_module.parameters()), "to_local")
            pl_module.load_state_dict({key: value.detach().clone() * 2 for key, value in state.items()}, assign=assign)
            if assign:  # an optimizer goes on with what it was given
                trainer.optimizers[0].param_groups[0]["params"][:] = list(pl_module.parameters())


@dataclass(frozen=True)
class Assigned:
    """``load_state_dict(assign=True)`` between two steps."""

    def run(self) -> dict[str, Any]:
        run = partial(trained, "16-mixed", callbacks=[_Assign()])
        return {
            "ddp": run(ddp(), Many(optimizer="sgd")),
            "sharded": run(fsdp2(wrap=Kinds), Many(optimizer="sgd")),
        }


@dataclass(frozen=True)
class Afterwards:
    """The module is its user's again: without autocast it computes with the fp32 weights."""

    def run(self) -> dict[str, Any]:
        module = Many()
        fit(module, plugins=[plan_for("bf16-mixed")], **fsdp2(wrap=Kinds))
        x = next(iter(batches()))[0]
        with torch.no_grad():
            out = module.net[0](x)
        alone = Many()
        alone.load_state_dict(whole(module), strict=False)  # tied: named once
        with torch.no_grad():
            return {"same": torch.equal(out, alone.net[0](x)), "dtype": out.dtype}


@dataclass(frozen=True)
class Read:
    """What is said of a weight that the step reads."""

    def run(self) -> str:
        return refused(lambda: fit(Penalised(), plugins=[plan_for("16-mixed")], **fsdp2(wrap=Kinds)))


KINDS = {"wrap": Kinds}
HEAD = {"pins": {"net.2": "fp32"}}
LORA = {"data": hf.token_batches()}
EQUAL: dict[str, Any] = {
    "bf16": Both("bf16-mixed", Many, {}, KINDS),
    "16 with skips": Both("16-mixed", partial(Many, bad=(2, 5)), {}, KINDS),
    "checkpointed": Both("16-mixed", Many, {"checkpointing": "Kinds"}, KINDS),
    "pinned linears": Both("bf16-mixed", Many, {"pins": {"down": "fp32", "net.2": "bf16"}}, KINDS),
    "a penalty on a pinned weight": Both("16-mixed", Penalised, HEAD, KINDS),
    "resharded to fewer": Both("bf16-mixed", Many, {}, {**KINDS, "reshard_after_forward": 1}),
    "offloaded": Both("16-mixed", Many, {}, {**KINDS, "cpu_offload": True}),
    "replicas": Both("16-mixed", Many, {}, {**KINDS, "device_mesh": (2, 1)}),
    "all in the root": Both("bf16-mixed", Many, {}, {"wrap": None}),
    "adapters": Both("bf16-mixed", Lora, LORA, {"wrap": None}),
    "ignored": Ignored(),
    "assigned": Assigned(),
}
