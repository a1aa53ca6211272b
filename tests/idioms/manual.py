"""Manual optimization as public projects write it: GANs, accumulation by hand, actors and critics, losses by turns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idioms.host import Host
from idioms.nets import Base, Block, ByHand, Net
from idioms.table import idiom

#: stock Lightning clips gradients that are still multiplied by the loss scale, in manual optimization
CLIPS = {f"{strategy} 16-mixed": "stock clips scaled gradients" for strategy in ("single", "ddp", "fsdp2", "zero2")}
PASSES = {"zero2": "two manual_backward() before a step with ZeRO"}
TWO = {"zero2": "DeepSpeed currently only supports single optimizer"}


class Gan(ByHand):
    """A generator and a discriminator, an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.generator = Net(outputs=8)
        self.discriminator = nn.Sequential(Block(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-3)
        discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-3)
        return [generator, discriminator], []

    def adversarial(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x).float()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@idiom("Lightning-AI/tutorials, basic-gan/gan.py; AntixK; lightning-bolts, gans/basic", refused=TWO, unused=True)
class TogglesTwoOptimizers(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.adversarial(self.generator(x), True)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (self.adversarial(x, True) + self.adversarial(self.generator(x).detach(), False)) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)


@idiom(
    "SEED-Voken, IBQ/models/ibqgan.py; generative-models, autoencoder.py; fish-speech",
    refused=TWO,
    unused=True,
    differs=CLIPS,
    rounded={"bf16-true": "the norm is computed in fp32"},
)
class TogglesAndClipsByHand(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        fake = self.generator(x)
        loss = functional.l1_loss(fake.float(), x.float()) + 0.1 * self.adversarial(fake, True)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = self.adversarial(x, True) + self.adversarial(fake.detach(), False)
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        self.untoggle_optimizer(second)


@idiom(
    "gemelo-ai/vocos, experiment.py; Matcha; piper: both optimizers in one step, as of HiFi-GAN",
    refused=TWO,
    unused=True,
)
class StepsTheDiscriminatorFirst(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(x)
        second.zero_grad()
        self.manual_backward(self.adversarial(x, True) + self.adversarial(fake.detach(), False))
        second.step()
        first.zero_grad()
        self.manual_backward(functional.mse_loss(fake.float(), x.float()) + self.adversarial(fake, True))
        first.step()


@idiom("openclimatefix/skillful_nowcasting, dgmr.py: the discriminator steps twice", refused=TWO, unused=True)
class StepsTheDiscriminatorTwice(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        for _ in range(2):
            second.zero_grad()
            fake = self.generator(x)
            loss = (
                functional.relu(1 - self.discriminator(x)).mean() + functional.relu(1 + self.discriminator(fake)).mean()
            )
            self.manual_backward(loss.float())
            second.step()
        first.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(x)).float().mean())
        first.step()


@idiom(
    "Lightning's docs: WGAN; facebookresearch/fastMRI, adversary_mixin.py; lama, adversarial.py",
    refused=TWO,
    unused=True,
)
class PenalizesGradients(Gan):
    """Double backward: the gradient's norm is part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(x).detach()
        mixed = (0.5 * x + 0.5 * fake).requires_grad_(True)
        judged = self.discriminator(mixed)
        (gradient,) = torch.autograd.grad(judged.sum(), mixed, create_graph=True)
        penalty = (gradient.float().norm(2, dim=1) - 1).pow(2).mean()
        loss = self.discriminator(fake).float().mean() - self.discriminator(x).float().mean() + penalty
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        first.zero_grad()
        self.manual_backward(-self.discriminator(self.generator(x)).float().mean())
        first.step()


@idiom(
    "taming-transformers, vqperceptual.py; SEED-Voken: an adaptive weight from torch.autograd.grad",
    refused=TWO,
    unused=True,
)
class WeighsTheAdversaryByGradients(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(x)
        nll = functional.l1_loss(fake.float(), x.float())
        g_loss = -self.discriminator(fake).float().mean()
        last = self.generator.head.weight
        nll_grad = torch.autograd.grad(nll, last, retain_graph=True)[0]
        g_grad = torch.autograd.grad(g_loss, last, retain_graph=True)[0]
        weight = torch.clamp(torch.norm(nll_grad) / (torch.norm(g_grad) + 1e-4), 0.0, 1e2).detach()
        first.zero_grad()
        self.manual_backward(nll + weight * g_loss)
        first.step()
        second.zero_grad()
        self.manual_backward(self.adversarial(x, True) + self.adversarial(fake.detach(), False))
        second.step()


@idiom("voicepaw/so-vits-svc-fork; NVIDIA-NeMo, audio_codec.py; piper", refused=TWO, unused=True)
class LogsAndSchedulesByHand(Gan):
    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        losses = [functional.mse_loss(self.generator(x).float(), x.float()), self.adversarial(x, True)]
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log_dict({"a": losses[0], "b": losses[1]}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.note("lr", self.lr_schedulers()[0].get_last_lr()[0])


@idiom("RVC-Boss/GPT-SoVITS, t2s_lightning_module.py: accumulation by hand, step every 4th batch", refused=PASSES)
class AccumulatesByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx > 0 and batch_idx % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@idiom(
    "pyannote/pyannote-audio, speaker_diarization.py; Lightning's docs: manual optimization with clipping",
    differs=CLIPS,
    rounded={"bf16-true": "the norm is computed in fp32"},
)
class ClipsByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


@idiom(
    "Zasder3/train-CLIP, wrapper.py; RAVE",
    refused={"zero2": "Gradients clipped by hand before the step, with ZeRO"},
    differs=CLIPS,
    rounded={"bf16-true": "the norm is computed in fp32"},
)
class ClipsWithTorchByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.log("norm", norm)
        optimizer.step()
        return loss


@idiom(
    "Zasder3/train-CLIP, wrapper.py: a loss per part of the batch, each backpropagated",
    refused=PASSES,
)
class BackwardsInParts(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(self.loss(part) / 2)
        optimizer.step()


@idiom("stable-audio-tools, arc.py; Lightning's docs: a closure by hand")
class StepsWithAClosure(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@idiom(
    "facebookresearch/theseus; nequip; older Lightning: loss.backward() in training_step",
    refused={"ddp": "loss.backward() with DDP", "zero2": "loss.backward() with ZeRO", "16-mixed": "loss.backward()"},
    differs={"fsdp2": "stock DDP does not sum the gradients of a bare loss.backward()"},
)
class CallsLossBackward(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        optimizer.step()
        return loss


@idiom("facebookresearch/ReAgent, sac_trainer.py; lightning-bolts, rl/sac_model.py", refused=TWO, unused=True)
class ActorAndCritic(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(9, 1)
        self.target = nn.Linear(9, 1).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.02), torch.optim.SGD(self.critic.parameters(), lr=0.02)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        actor, critic = self.optimizers()
        with torch.no_grad():
            target = y + 0.5 * self.target(torch.cat([x, self.net(x).to(x.dtype)], 1))
        value = self.critic(torch.cat([x, y], 1))
        critic.zero_grad()
        self.manual_backward(functional.mse_loss(value.float(), target.float()))
        critic.step()
        actor.zero_grad()
        self.manual_backward(-self.critic(torch.cat([x, self.net(x).to(x.dtype)], 1)).float().mean())
        actor.step()
        for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)


@idiom("lightly-ai/lightly; threestudio, control4d_multiview.py: manual, one optimizer, log and schedule")
class StepsOneOptimizerAndScheduler(ByHand):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad(set_to_none=True)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", loss)


@idiom("NVIDIA-NeMo/NeMo; lucidrains: some batches take no step", refused=PASSES)
class SkipsTheStepOfSomeBatches(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx % 3 != 1:
            optimizer.step()


@idiom("PyTorch's DDP docs; NVIDIA-NeMo; GPT-SoVITS: trainer.strategy.model.no_sync in accumulation", refused=PASSES)
class AccumulatesWithNoSync(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        with self.trainer.strategy.block_backward_sync() if self._blocks(last) else torch.enable_grad():
            self.manual_backward(self.loss(batch) / 2)
        if last:
            optimizer.step()
            optimizer.zero_grad()

    def _blocks(self, last: bool) -> bool:
        return not last and hasattr(self.trainer.strategy, "block_backward_sync")


@idiom("MAML: learn2learn's Lightning examples; higher: gradients of gradients through a functional step")
class MetaLearns(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = torch.zeros(8, 1, device=x.device, dtype=torch.float32, requires_grad=True)
        features = self.net.features(x).float()
        inner = functional.mse_loss(features[:2] @ weight, y[:2].float())
        (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
        adapted = weight - 0.1 * gradient
        return functional.mse_loss(features[2:] @ adapted, y[2:].float()) + 0.0 * self.net.head(x).float().sum()


@idiom("Lightning's TBPTT docs; darts: hidden states are kept from batch to batch")
class CarriesHiddenStates(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.hidden: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer = self.optimizers()
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        hidden = self.cell(x, hidden.to(x.dtype))
        loss = functional.mse_loss(self.net(hidden).float(), y.float())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.hidden = hidden.detach()
        return loss


@idiom("CompVis/taming-transformers, disc_start; asteroid; lightning-bolts")
def switches_losses_by_epochs(host: Host) -> None:
    class Switches(ByHand):
        """Warm-up by one loss, then another; an epoch each."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            out = self(batch[0]).float()
            loss = out.abs().mean() if self.current_epoch == 0 else functional.mse_loss(out, batch[1].float())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    host.fit(Switches(), max_epochs=2)
