"""Manual optimization: whatever way a user steps by hand, gradients are seen unscaled and divided once.

The argument is exact. With every module pinned to fp32, ``16-mixed`` computes what ``32-true`` does, times a power of
two that is taken out again; so its weights must equal those of stock Lightning in fp32 bit for bit, at any scale. A
missing or a second division, or a clip of scaled gradients (complaint 2, PL 18089), would show in every bit.
"""

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError
from support.cells import WHOLE
from support.manual import Manual, Pair, between, in_turn
from support.models import Regression, batches, same_weights, weights
from support.replacing import REPLACED, Replaces
from support.running import fit, trainer
from support.traces import same_runs, traced

PINNED = {"net": "fp32"}


def _clipped(m: Any, opt: Any) -> None:
    clip_grad_norm_(m.parameters(), 0.5)


def _clipped_by_lightning(m: Any, opt: Any) -> None:
    m.clip_gradients(opt, gradient_clip_val=0.02, gradient_clip_algorithm="value")


def _unscaled(m: Any, opt: Any) -> None:
    if m.user_scaler is not None:
        m.user_scaler.unscale_(opt)
    _clipped(m, opt)


def own_scaler_calls(m: Any, batch: Any, batch_idx: int) -> None:
    opt, scaler = m.optimizers(), m.user_scaler
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    if scaler is None:
        m.look()
        opt.step()
    else:
        scaler.unscale_(opt)
        m.look()
        scaler.step(opt)
        scaler.update()


def own_scale(m: Any, batch: Any, batch_idx: int) -> None:
    """A raw ``backward`` with the user's own ``scaler.scale``, outside autocast as torch's documentation asks."""
    opt, scaler = m.optimizers(), m.user_scaler
    opt.zero_grad()
    loss = m.loss(batch)
    with torch.autocast("cpu", enabled=False):
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(opt)
    m.look()
    opt.step()


def two_backwards(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    m.look()
    m.manual_backward(0.5 * m.loss(batch))
    m.look()
    m.manual_backward(0.25 * m.loss(batch))
    m.look()
    opt.step()


def every_second_batch(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    m.manual_backward(m.loss(batch) / 2)
    m.look()
    if batch_idx % 2:
        clip_grad_norm_(m.parameters(), 0.5)
        opt.step()
        opt.zero_grad()


def closure(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()

    def run() -> Any:
        opt.zero_grad()
        loss = m.loss(batch)
        m.manual_backward(loss)
        m.look()
        return loss

    opt.step(closure=run)


def step_without_zeroing(m: Any, batch: Any, batch_idx: int) -> None:
    """Gradients that were stepped once already are added to: they wait unscaled and must be scaled back first."""
    opt = m.optimizers()
    m.manual_backward(m.loss(batch))
    m.look()
    opt.step()
    if batch_idx % 3 == 2:
        opt.zero_grad()


plain, own_unscale = between(lambda m, opt: None, "plain"), between(_unscaled, "own unscale_")
clips = [between(_clipped, "torch's own clip"), between(_clipped_by_lightning, "Lightning's clip")]
WAYS = [plain, *clips, own_unscale, own_scaler_calls, own_scale]
WAYS += [two_backwards, every_second_batch, closure, step_without_zeroing]
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
RULES = {
    "static": LossScaling.static(2.0**10),
    "grows by 2 every third": LossScaling(init_scale=2.0**16, growth_interval=3),
}


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("plain", "static"),
        ("fused", "grows by 2 every third"),
        pytest.param("sgd", "grows by 2 every third", marks=WHOLE),
    ],
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_stepping_equals_fp32_bit_for_bit(way: Any, optimizer: str, rule: str) -> None:
    plan = MixedPrecisionPlan("16-mixed", pins=PINNED, loss_scaling=RULES[rule])
    stock, ours = (
        traced(Manual(way, OPTIMIZERS[optimizer]), **host) for host in ({"precision": "32-true"}, {"plugins": [plan]})
    )
    assert same_runs(stock, ours)
    assert all(same_weights(a, b) for a, b in zip(stock.module.true, ours.module.true, strict=True))
    assert not same_weights(ours.start, ours.weights[-1])
    assert (plan.applied_steps, plan.skipped_steps) == (ours.global_steps[-1], 0)


@pytest.mark.parametrize("mode", ["bf16-mixed", pytest.param("32-true", marks=WHOLE)])
@pytest.mark.parametrize("way", [way for way in WAYS if way is not own_scale], ids=lambda way: way.__name__)
def test_modes_without_a_scale_equal_stock(way: Any, mode: str) -> None:
    # Lightning refuses to clip a fused optimizer's gradients, here too
    hosts = {"precision": mode}, {"plugins": [MixedPrecisionPlan(mode)]}
    assert same_runs(*(traced(Manual(way, OPTIMIZERS["plain"]), **host) for host in hosts))


class Overflows(Manual):
    def loss(self, batch: Any) -> Any:
        bad = self.trainer.global_step == 3 and torch.is_grad_enabled()
        return super().loss(batch) * (float("inf") if bad else 1.0)


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
@pytest.mark.parametrize("way", [plain, own_unscale, own_scaler_calls, closure], ids=lambda way: way.__name__)
def test_an_overflow_is_skipped_and_counted_whatever_the_way(way: Any, optimizer: str) -> None:
    plan = MixedPrecisionPlan("16-mixed", pins=PINNED, loss_scaling=LossScaling(init_scale=64.0))
    trace = traced(Overflows(way, OPTIMIZERS[optimizer]), plugins=[plan])
    assert trace.skipped == [step == 3 for step in range(8)]
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    assert same_weights(trace.weights[2], trace.weights[3])
    assert trace.scales == [64.0] * 3 + [32.0] * 5


def test_a_loss_is_scaled_only_for_optimizers_of_the_run() -> None:

    class Adapts(Manual):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            own = torch.optim.SGD(self.parameters(), lr=1e-2)
            with torch.enable_grad():
                self.manual_backward(self.loss(batch))
            own.step()
            own.zero_grad()

    runs: list[Any] = []
    for precision in ({"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("16-mixed", pins=PINNED)]}):
        module = Adapts()
        trainer(inference_mode=False, **precision).test(module, batches(), verbose=False)
        runs.append(weights(module))
    assert same_weights(*runs)
    assert not same_weights(runs[0], weights(Adapts()))


def _pair_plan(**rule: Any) -> MixedPrecisionPlan:
    pins = {"net": "fp32", "other": "fp32"}
    return MixedPrecisionPlan("16-mixed", pins=pins, loss_scaling=LossScaling(init_scale=64.0, **rule))


def both_then_step(m: Pair, batch: Any, batch_idx: int) -> None:
    first, second = m.optimizers()
    first.zero_grad()
    second.zero_grad()
    for loss in m.losses_of(batch, batch_idx):
        m.manual_backward(loss)
    clip_grad_norm_(m.net.parameters(), 0.5)
    first.step()
    second.step()


def summed(m: Pair, batch: Any, batch_idx: int) -> None:
    first, second = m.optimizers()
    first.zero_grad()
    second.zero_grad()
    m.manual_backward(sum(m.losses_of(batch, batch_idx)))
    first.step()
    second.step()


def toggled(m: Pair, batch: Any, batch_idx: int) -> None:
    for opt, index in zip(m.optimizers(), (0, 1), strict=True):
        m.toggle_optimizer(opt)
        opt.zero_grad()
        m.manual_backward(m.losses_of(batch, batch_idx)[index])
        opt.step()
        m.untoggle_optimizer(opt)


PAIR_WAYS = [in_turn, both_then_step, summed, toggled]
by_way = pytest.mark.parametrize("way", PAIR_WAYS, ids=lambda way: way.__name__)


@by_way
def test_two_optimizers_equal_fp32_bit_for_bit(way: Any) -> None:
    here = traced(Pair(way), plugins=[_pair_plan(growth_interval=2)])
    assert same_runs(traced(Pair(way), precision="32-true"), here)
    assert here.scales == [64.0, 128.0, 128.0, 256.0, 256.0, 512.0, 512.0, 1024.0]


@pytest.mark.parametrize("which", ["net", "other"])
@by_way
def test_an_overflow_in_one_optimizer_skips_that_one(way: Any, which: str) -> None:
    plan = _pair_plan()
    trace = traced(Pair(way, {3: which}), plugins=[plan])
    before, after = trace.weights[2], trace.weights[3]
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"net", "other"} - {which}
    assert trace.scales == [64.0] * 3 + [32.0] * 5
    assert (plan.applied_steps, plan.skipped_steps) == (15, 1)


# ------------------------------------------------------------------ optimizers that are replaced or wrapped in the run


def by_turns(ways: list[Any]) -> Any:
    """Every way of stepping with every way of replacing; each way of replacing is run often with two of them."""
    cells: list[Any] = []
    for place, how in enumerate(REPLACED):
        often = ways[place % len(ways)], ways[(place + 1) % len(ways)]
        cells += [
            pytest.param(way, how, id=f"{way.__name__}, {how}", marks=[] if way in often else WHOLE) for way in ways
        ]
    return pytest.mark.parametrize(("way", "how"), cells)


@by_turns([plain, *clips, own_unscale, own_scaler_calls, two_backwards])
def test_replaced_optimizers_equal_fp32_bit_for_bit(way: Any, how: str) -> None:
    hosts = {"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("16-mixed", pins=PINNED)]}
    stock, ours = (traced(Manual(way, OPTIMIZERS["sgd"]), Replaces(how), **host, max_epochs=2) for host in hosts)
    assert same_runs(stock, ours)
    assert all(same_weights(a, b) for a, b in zip(stock.module.true, ours.module.true, strict=True))
    assert not same_weights(ours.start, ours.weights[-1])


@by_turns(PAIR_WAYS)
def test_two_replaced_optimizers_equal_fp32_bit_for_bit(way: Any, how: str) -> None:
    ours = traced(Pair(way), Replaces(how), plugins=[_pair_plan(growth_interval=2)], max_epochs=2)
    assert same_runs(traced(Pair(way), Replaces(how), precision="32-true", max_epochs=2), ours)


@pytest.mark.parametrize("how", REPLACED)
def test_replaced_optimizers_equal_fp32_under_automatic_optimization(how: str) -> None:
    hosts = {"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("16-mixed", pins=PINNED)]}
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "max_epochs": 2, "accumulate_grad_batches": 2}
    stock, ours = (traced(Regression(OPTIMIZERS["sgd"]), Replaces(how), **host, **options) for host in hosts)
    assert same_runs(stock, ours)


@pytest.mark.parametrize("how", ["set up each epoch", "assigned after backward", "an average around each"])
def test_an_overflow_under_a_replaced_optimizer_is_skipped_and_counted(how: str) -> None:
    plan = MixedPrecisionPlan("16-mixed", pins=PINNED, loss_scaling=LossScaling(init_scale=64.0))
    trace = traced(Overflows(plain, OPTIMIZERS["sgd"]), Replaces(how), plugins=[plan])
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    assert same_weights(trace.weights[2], trace.weights[3])


def test_an_optimizer_put_in_that_the_plan_cannot_step_is_refused() -> None:
    class Late(Manual):
        def on_train_start(self) -> None:
            self.trainer.optimizers = [torch.optim.LBFGS(self.parameters())]

    with pytest.raises(PlanError, match=r"LBFGS, which evaluates its closure again, with precision='16-mixed'"):
        fit(Late(plain), plugins=[MixedPrecisionPlan("16-mixed")])


def test_schedulers_put_in_with_new_optimizers_wait_on_a_skipped_step() -> None:
    class Anneals(Regression):
        """Without a scheduler in the first epoch, with one of the user's own in the second."""

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
            if not self.trainer.current_epoch:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_start(self) -> None:
            self.trainer.strategy.setup_optimizers(self.trainer)

    module = Anneals(overflow_at=(9,))
    fit(module, plugins=[MixedPrecisionPlan("16-mixed")], max_epochs=2)
    assert module.lrs == [1e-2] * 8 + [1e-2 * 0.5**halvings for halvings in (0, 1, 1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("manual", [True, False], ids=["manual", "automatic"])
def test_users_see_true_gradients_of_parameters_that_no_optimizer_has(manual: bool) -> None:
    """As they clip and log norms over ``self.parameters()``, with a backbone that was left out of the optimizer."""

    class HeadOnly(Manual):
        def __init__(self) -> None:
            super().__init__(between(_clipped))
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) if not manual else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if not manual:
                _clipped(self, optimizer)
                self.look()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[3].parameters(), lr=1e-2)

    hosts = {"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("16-mixed", pins=PINNED)]}
    stock, ours = (traced(HeadOnly(), **host) for host in hosts)
    assert same_runs(stock, ours)
    assert len(ours.module.true) == 8
    assert all(same_weights(a, b) for a, b in zip(stock.module.true, ours.module.true, strict=True))


def test_counts_go_past_what_a_half_number_counts_to() -> None:
    """bf16 counts to 256; the default dtype of the training step is a half one here."""

    class Spoilt(Manual):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * float("nan")

    plan = MixedPrecisionPlan("bf16-true", nonfinite=NonFinite(max_consecutive=10**6))
    with pytest.raises(NonFiniteError, match="0 of its 300"):
        fit(Spoilt(plain), plugins=[plan], data=batches(rows=300, batch_size=1))
    assert (plan.applied_steps, plan.skipped_steps) == (0, 300)
