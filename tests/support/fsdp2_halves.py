"""What FSDP2 gathers in half precision: bytes that cross, copies that stay, and runs beside DDP's."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support import hf
from support.collectives import Moved
from support.models import FEATURES
from support.oracles import plan_for
from support.running import fit
from support.sharded import Both, Language, Ranked, ddp, fsdp2, refused, trained

VOCABULARY, WIDTH, LAYERS = 251, 64, 3
_HEADS = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
_llama = partial(hf.llama, vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, **_HEADS)
_gpt2 = partial(hf.gpt2, vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=4)


def _twice() -> nn.Module:
    """A Llama whose blocks are the first one, so that it runs three times."""
    model: Any = _llama()
    layers = model.model.layers
    layers[1] = layers[2] = layers[0]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "one block": _twice}


def text() -> DataLoader[Tensor]:
    ids = torch.randint(VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(3))
    return DataLoader(cast("Any", ids), batch_size=2)


class Text(Language):
    models, vocabulary, optimizer = MODELS, VOCABULARY, "adamw"


class Counted(Text):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        #: bytes of half-precision copies of block weights that wait for the backward pass
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks = [part for part in self.model.modules() if type(part).__name__.endswith(("DecoderLayer", "GPT2Block"))]
        sizes = {p.numel() for block in blocks for p in block.parameters() if p.dim() == 2}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.dtype.itemsize == 2 and tensor.numel() in sizes:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        weights = [t for t in saved.values() if t.dim() == 2 and WIDTH in t.shape and batch.numel() not in t.shape]
        assert weights
        self.kept.append(sum(t.untyped_storage().nbytes() for t in weights))
        return loss


def bytes_moved(kind: str) -> dict[str, Any]:
    module, moved = Counted(kind), Moved()
    sharded = trained("bf16-mixed", fsdp2(wrap=None), module, data=text(), callbacks=[moved])
    other = trained("bf16-mixed", ddp(), Counted(kind), data=text())
    return {"sharded": sharded, "ddp": other, "steps": moved.steps, "kept": module.kept}


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


class Asking(Kinds):
    """Asks weights for more than their values, and reads views of them as autocast does, which any module may."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight, kernel = super().forward(x), self.one.weight, self.conv.weight.squeeze(1)
        x = x + weight.new_zeros(x.shape) + weight.new_full((1,), 0.1) + torch.ones_like(self.up.weight)[0]
        x = x.double().type_as(weight).to(weight) * x.new_tensor(weight.size(0) / weight.numel())
        for _ in range(2):
            x = x + nn.functional.conv1d(x.unsqueeze(1), kernel.unsqueeze(1), padding=1).mean(1)
        rows = [nn.functional.linear(x, part) for part in self.up.weight.chunk(2)]
        return x + (torch.cat(rows, 1) @ self.up.weight) + torch.finfo(weight.dtype).eps


class Many(Ranked):
    def __init__(self, optimizer: str = "adamw", bad: tuple[int, ...] = ()) -> None:
        super().__init__(bad, optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(Kinds(), Kinds(), nn.Linear(FEATURES, 1))


class Penalised(Many):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net[2].weight.float().pow(2).sum()


class AskingMany(Many):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(Asking(), Asking(), nn.Linear(FEATURES, 1))


class PastItsPin(Many):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + nn.functional.conv1d(batch[0][..., None], self.net[2].weight[..., None]).mean()


def read(module: type[Many] = Penalised, wrap: Any = Kinds, **options: Any) -> str:
    return refused(lambda: fit(module(), plugins=[plan_for("16-mixed", **options)], **fsdp2(wrap=wrap)))


KINDS = {"wrap": Kinds}
HEAD = {"pins": {"net.2": "fp32"}}
EQUAL: dict[str, Any] = {
    "bf16": Both("bf16-mixed", Many, {}, KINDS),
    "weights asked for no value": Both("bf16-mixed", AskingMany, {}, KINDS),
    "pinned linears": Both("bf16-mixed", Many, {"pins": {"down": "fp32", "net.2": "bf16"}}, KINDS),
    "a penalty on a pinned weight": Both("16-mixed", Penalised, HEAD, KINDS),
}
