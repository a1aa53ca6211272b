"""What public projects build modules of: norms of weights, casts and autocast by hand, checkpointing, own functions."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from idioms.host import WIDTH, Host
from idioms.nets import Base, Block, Net
from idioms.table import idiom

WITHOUT_DIMENSION = dict.fromkeys(("fsdp2", "zero2"), "a parameter without a dimension")


@idiom("fish-diffusion, hifigan; piper; YuliangXiu/ICON, MLP.py: weight_norm of old")
class OldWeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].linear = torch.nn.utils.weight_norm(self.net.blocks[0].linear)


@idiom("state-spaces/s4; vocos, discriminators.py: parametrizations.weight_norm")
class NewWeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].linear = parametrizations.weight_norm(self.net.blocks[0].linear)


@idiom("openclimatefix/skillful_nowcasting, discriminators.py; lama: spectral_norm of old", same_rows=True)
class OldSpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].linear = torch.nn.utils.spectral_norm(self.net.blocks[0].linear)


@idiom("skillful_nowcasting, common.py: parametrizations.spectral_norm", same_rows=True)
class NewSpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].linear = parametrizations.spectral_norm(self.net.blocks[0].linear)


@idiom("geotorch; mattergen; equivariant nets: an own parametrization")
class OwnParametrization(Base):
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.net.blocks[0].linear, "weight", self.Symmetric())


@idiom("solo-learn, dino.py: DINOHead's last layer; lightly, heads.py: weight_g stays 1 and is frozen")
class FrozenWeightG(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.utils.weight_norm(nn.Linear(8, 1, bias=False))
        self.last.weight_g.data.fill_(1)
        self.last.weight_g.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.normalize(self.net.features(x), dim=-1, p=2)) + self.net.head(x)


@idiom("stable-audio-tools, conditioners.py; openvpi/DiffSinger, base_task.py; threestudio; boltz")
class DisablesAutocast(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x)
        with torch.autocast(x.device.type, enabled=False):
            return functional.smooth_l1_loss(out.float(), y.float())


@idiom(
    "jwohlwend/boltz, triangular; openfold, primitives.py: a layer in fp32 within autocast",
    left_out={"bf16-true": "the layer's weights are half, and stock ends in a dtype error too"},
    refused=dict.fromkeys(("fsdp2 bf16-mixed", "fsdp2 16-mixed"), "something reads it outside a matmul"),
)
class RunsALayerInFloat(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net.features(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.net.head(hidden.float())


@idiom("aqlaboratory/openfold, primitives.py: LayerNorm casts its weight where autocast is off; fish-speech")
class CastsWeightsInForward(Base):
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return functional.layer_norm(x, (WIDTH,), self.weight.to(x.dtype))

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


@idiom(
    "Stability-AI/generative-models; CompVis, util.py: GroupNorm32; openai/guided-diffusion",
    left_out={"bf16-true": "stock ends in a dtype error too"},
)
class NormsInFloat(Base):
    class GroupNorm32(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).type(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.group = self.GroupNorm32(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.group(x))


@idiom("litgpt, rmsnorm.py; RWKV; kuleshov-group/mdlm: RMSNorm in fp32 and back")
class RmsNormInFloat(Base):
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (wide * self.weight).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.rms = self.Rms()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.rms(x))


@idiom("CompVis/stable-diffusion, openaimodel.py: h.type(self.dtype); AudioLDM; bjing2016/alphaflow: part.half()")
class CastsATeacherToHalf(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            parameter = next(self.teacher.parameters())
            target = self.teacher(batch[0].to(parameter.dtype)).float()
        return super().loss(batch) + functional.mse_loss(self(batch[0]).float(), target)


@idiom("CompVis/stable-diffusion, util.py: checkpoint; Stability-AI/stable-audio-tools; openfold, checkpointing.py")
class CheckpointsByHand(Base):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.net.head(x)


@idiom("CompVis/stable-diffusion: use_reentrant checkpointing; facebookresearch/multimodal; Mask3D")
class CheckpointsReentrant(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.net.head(x)


@idiom(
    "CompVis/stable-diffusion, util.py: CheckpointFunction; textual_inversion; generative-models",
    refused={"fsdp2": "used in the step outside of the unit that holds it"},
)
class OwnCheckpointFunction(Base):
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.run, ctx.x, ctx.parameters = run, x, parameters
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            x = ctx.x.detach().requires_grad_(True)
            with torch.enable_grad():
                out = ctx.run(x)
            grads = torch.autograd.grad(out, (x, *ctx.parameters), gradient)
            return None, *grads

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        block = self.net.blocks[0]
        x = self.Recompute.apply(block.linear.forward, x, block.linear.weight, block.linear.bias)
        return self.net(x)


@idiom("lightly-ai/lightly, dist.py: GatherLayer; solo-learn, misc.py; IDEA-CCNL/Fengshenbang-LM")
class OwnFunctionScalesGradients(Base):
    class Reverse(torch.autograd.Function):
        """Gradient reversal, of domain adaptation."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return -0.1 * gradient

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net.features(x)
        return functional.mse_loss(self.net.head(self.Reverse.apply(hidden)).float(), y.float()) + super().loss(batch)


@idiom("SEED-Voken, lookup_free_quantize.py; vector-quantize-pytorch; 1d-tokenizer: straight-through")
class StraightThrough(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net.features(x)
        signs = torch.where(hidden > 0, 1.0, -1.0).to(hidden.dtype)
        return self.net.head(hidden + (signs - hidden).detach())


@idiom("NVIDIA apex examples; hi-ml; mmcv: custom_fwd and custom_bwd")
class CustomForwardInFloat(Base):
    class Exp(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.tanh(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (out,) = ctx.saved_tensors
            return gradient * (1 - out * out)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.Exp.apply(self(x)).float(), y.float())


@idiom(
    "state-spaces/s4, ss kernels; safari, fftconv: FFT in fp32; s4d",
    left_out={"bf16-true": "an FFT of half inputs: stock ends in an error too"},
)
class ConvolvesByFft(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float(), n=2 * WIDTH) * torch.fft.rfft(self.kernel.float(), n=2 * WIDTH)
        return self.net(torch.fft.irfft(spectrum, n=2 * WIDTH)[..., :WIDTH].to(x.dtype))


@idiom("state-spaces/s4, OptimModule: parameters with _optim options, other rates for them; safari")
class ParametersWithOptions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.zeros(WIDTH))
        self.log_dt._optim = {"lr": 0.001, "weight_decay": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * torch.exp(self.log_dt))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        optimizer = torch.optim.AdamW([p for p in parameters if not hasattr(p, "_optim")], lr=0.02, eps=1e-3)
        special = [p for p in parameters if hasattr(p, "_optim")]
        optimizer.add_param_group({"params": special, **special[0]._optim})
        return optimizer


@idiom("wayveai/fiery; ST-P3; asteroid: a parameter that learns the losses' weights", refused=WITHOUT_DIMENSION)
class WeighsLossesByUncertainty(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.0))

    def loss(self, batch: Any) -> Tensor:
        factor = 1 / torch.exp(self.log_variance)
        return factor * super().loss(batch) + 0.5 * self.log_variance


@idiom(
    "openai/CLIP; Zasder3/train-CLIP, model.py: logit_scale = nn.Parameter(ones([]) * log(1 / 0.07))",
    refused=WITHOUT_DIMENSION,
)
class LearnsATemperature(Base):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones([]) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * self.net(x)

    def on_train_batch_end(self, *rest: Any) -> None:
        self.logit_scale.data.clamp_(0, 0.55)


@idiom("torchgeo; fastMRI; nnDetection: batch norms", same_rows=True)
class BatchNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


@idiom(
    "lightly, simclr.py; solo-learn: sync_batchnorm of the Trainer; torchdrug",
    left_out={
        "single": "there is nothing to synchronize",
        "ddp": "torch's SyncBatchNorm needs a GPU",
        "fsdp2": "as DDP",
        "zero2": "as DDP",
    },
)
def sync_batch_norms(host: Host) -> None:
    host.fit(BatchNorms(), sync_batchnorm=True)


@idiom(
    "BlinkDL/RWKV-LM; karpathy; darts: dropout",
    left_out={
        "fsdp2": "masks are drawn per rank in an order that units change",
        "zero2": "as FSDP2",
        "ddp": "as FSDP2",
    },
)
class Drops(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.drop(x))


@idiom("NVIDIA-NeMo, adapters; lightly-train, lora.py; peft by hand: low rank beside a frozen layer")
class AddsLowRank(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.up(self.down(x))


@idiom("threestudio; instant-ngp wrappers; nerf_pl: embeddings of positions in fp32")
class EmbedsPositions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = x[:, :4, None] * self.frequencies
        return self.net(torch.cat([angles.sin(), angles.cos()], -1).flatten(1)[:, :WIDTH])


@idiom("uni2ts; darts, tft; pytorch-forecasting: attention with a mask of -inf")
class AttendsWithAMask(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.full((4, 4), float("-inf"), dtype=x.dtype, device=x.device), 1)
        return self.net(self.attention(x[None], x[None], x[None], attn_mask=mask)[0][0])


@idiom("txie-93/cdvae; torchmd-net; schnetpack: forces by autograd of energies within the step")
class LearnsForces(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_(True)
        energy = self(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return functional.mse_loss(energy.float(), y.float()) + 0.1 * forces.float().pow(2).mean()


@idiom(
    "lightly benchmarks, main.py; fish-speech; boltz: torch.compile of a part",
    left_out=dict.fromkeys(("32-true", "16-mixed", "bf16-true"), "compiled once, in one mode, for time's sake"),
)
class CompilesAPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].linear = torch.compile(self.net.blocks[0].linear, backend="eager")


@idiom("uni2ts; litgpt; clovaai/donut: embeddings tied to the output")
class TiesEmbeddings(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.out = nn.Linear(WIDTH, 5, bias=False)
        self.out.weight = self.embedding.weight

    def loss(self, batch: Any) -> Tensor:
        tokens = (batch[0].float().abs() * 3).long().clamp(max=4)
        logits = self.out(self.net.features(self.embedding(tokens)))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()) + self.loss_of_head(batch)

    def loss_of_head(self, batch: Any) -> Tensor:
        return super().loss(batch)


@idiom("AntixK/PyTorch-VAE; scvi-tools: reparameterization and a KL term")
class Variational(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        mean, log_variance = self.net.features(x).chunk(2, 1)
        noise = torch.linspace(-1, 1, mean.numel(), device=x.device, dtype=mean.dtype).view_as(mean)
        z = mean + noise * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).float().sum(1).mean()
        return functional.mse_loss(self.net.head(torch.cat([z, z], 1)).float(), y.float()) + 0.01 * kl


@idiom("kuleshov-group/mdlm; RWKV; bionemo: z-loss and float logits")
class ComputesLossInDouble(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x).double() - y.double()).pow(2).mean()


@idiom("detectron2; Mask3D; d2go: losses in a dict, summed by name")
class SumsADictOfLosses(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x).float()
        losses = {"l1": functional.l1_loss(out, y.float()), "l2": functional.mse_loss(out, y.float())}
        self.log_dict({f"train/{name}": loss.detach() for name, loss in losses.items()})
        return sum(losses.values())


@idiom("stable-diffusion, ddpm.py: losses weighed by a schedule in buffers; audio-diffusion; mattergen")
class DiffusesNoise(Base):
    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 2e-2, 10)
        self.register_buffer("sqrt_alphas", (1 - betas).cumprod(0).sqrt())
        self.register_buffer("sqrt_rest", (1 - (1 - betas).cumprod(0)).sqrt())
        self.back = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        t = torch.arange(len(x), device=x.device)
        noise = torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view_as(x)
        noisy = self.sqrt_alphas[t, None] * x + self.sqrt_rest[t, None] * noise
        return functional.mse_loss(
            self.back(self.net.features(noisy.to(x.dtype))).float(), noise.float()
        ) + super().loss(batch)


@idiom("lightly, models; torchvision: stochastic depth that keeps all; several forwards of one module a step")
class CallsTheModuleTwice(Base):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        one, other = self(x), self(x.flip(1))
        return functional.mse_loss(one.float(), y.float()) + (one - other).float().pow(2).mean()


@idiom("Mask3D; multimodal: a module in a plain list beside registered ones; mixture of two heads")
class ChoosesHeadsByModuleDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 1)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net.features(x)
        return sum(head(hidden) for head in self.heads.values()) + self.net.head(hidden)


@idiom("NVlabs; threestudio; bionemo: a frozen net that is kept out of the state dict", wrap=None)
class HidesATeacherInAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Net().requires_grad_(False).eval()]

    def loss(self, batch: Any) -> Tensor:
        self.hidden[0].to(self.device)
        with torch.no_grad():
            target = self.hidden[0](batch[0].float()) if self._wide() else self.hidden[0].to(self.dtype)(batch[0])
        return super().loss(batch) + functional.mse_loss(self(batch[0]).float(), target.float())

    def _wide(self) -> bool:
        return self.dtype == torch.float32


@idiom(
    "lightly; fairseq: a LayerDrop that all ranks draw alike; wav2vec2",
    unused=True,
    refused={"zero2": "without a gradient in a backward pass, with ZeRO"},
)
class DropsLayersByBatch(Base):
    def forward(self, x: Tensor) -> Tensor:
        step = self.trainer.global_step
        for place, block in enumerate(self.net.blocks):
            if not (self.training and (step + place) % 3 == 0):
                x = block(x)
        return self.net.head(x)


@idiom("openfold; boltz: recycling, the first passes without gradients")
class Recycles(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            previous = self.net.features(x)
        return self.net.head(self.net.features(x + 0.1 * previous.detach().to(x.dtype)))


@idiom("litgpt, lit-llama: a Lightning module with torch's transformer layers")
class TorchTransformer(Base):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.encoder(x[None])[0])


@idiom("darts, rnn; speech: an LSTM over a sequence", wrap=None, left_out={"16-mixed": "no LSTM in fp16 on a CPU"})
class LongShortTerm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.lstm(x[None])[0][0])


@idiom("solo-learn, barlow; lightly: a loss module with buffers and no parameters")
class LossModule(Base):
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pos_weight", torch.tensor([2.0]))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            targets = (y > 0).to(out.dtype)
            return functional.binary_cross_entropy_with_logits(out, targets, pos_weight=self.pos_weight)

    def __init__(self) -> None:
        super().__init__()
        self.criterion = self.Weighted()

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch[0]).float(), batch[1])


def _unused_block() -> Block:
    return Block()


@idiom(
    "lightning-flash; ClimaX; many: a part that no step uses",
    unused=True,
    refused={"zero2": "without a gradient in a backward pass, with ZeRO"},
)
class LeavesAPartUnused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.spare = _unused_block()
