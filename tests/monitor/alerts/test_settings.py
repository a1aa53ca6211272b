from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from lightning_mp import PlanError
from lightning_mp.monitor.alerts import Alerts, AlertSettings


@pytest.mark.parametrize("given", [None, True, {}, AlertSettings()])
def test_nobody_has_to_write_anything(given: object) -> None:
    assert AlertSettings.of(given) == AlertSettings()  # type: ignore[arg-type]


def test_false_is_no_rule_at_all() -> None:
    assert Alerts(False).rules == []


def test_it_is_built_from_a_configuration() -> None:
    config = OmegaConf.create({"spike_ratio": 20, "kinds": ["grad_norm_spike"]})
    assert AlertSettings.of(config) == AlertSettings(spike_ratio=20, kinds=("grad_norm_spike",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spike_ration": 20}, "Did you mean 'spike_ratio'"),
        ({"kinds": ["loss_plateu"]}, "Did you mean 'loss_plateau'"),
        ({"kinds": ["nonfinite_loss"]}, "grad_norm_spike, loss_plateau"),
        ({"kinds": "loss_plateau"}, r"kinds=['loss_plateau']"),
        ({"kinds": 3}, "a list of kinds"),
        ({"plateau_window": 200.5}, "a whole number"),
        ({"plateau_window": 0}, "a finite number > 0"),
        ({"divergence_window": 1}, "at least 8"),
        ({"spike_ratio": float("nan")}, "default, 10"),
        ({"spike_sigmas": "many"}, "a finite number"),
        ({"memory_gib": True}, "a finite number"),
        (3, "a mapping"),
    ],
)
def test_what_cannot_be_is_refused_and_says_what_could(given: object, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        AlertSettings.of(given)  # type: ignore[arg-type]


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(PlanError) as error:
        AlertSettings(kinds=("loss",), spike_ratio=-1, spike_window=0)  # type: ignore[arg-type]
    assert len(error.value.faults) == 3
