from __future__ import annotations

import json

import pytest

from lightning_mp.monitor.events import KINDS, Event
from lightning_mp.monitor.run_folder import to_json

EVENT = Event(
    step=17,
    kind="nonfinite_grad",
    severity="warning",
    rank=1,
    module="model.layers.3.mlp",
    parameter="model.layers.3.mlp.weight",
    value=float("inf"),
    evidence={"loss_scale": 1024.0},
    cause="the product overflows in fp16",
    advice="pin it to fp32",
    action="skip",
)


def test_it_round_trips_through_a_line_of_json() -> None:
    line = json.loads(to_json(EVENT.to_dict()))
    assert line["value"] is None
    assert Event.from_dict({**line, "value": float("inf"), "of_a_later_version": 1}) == EVENT


def test_the_line_for_people_says_where_why_and_what_to_do() -> None:
    assert str(EVENT) == (
        "step 17: nonfinite grad in rank 1, module 'model.layers.3.mlp', parameter 'model.layers.3.mlp.weight' "
        "(loss_scale 1024). Likely cause: the product overflows in fp16. What to do: pin it to fp32. Action taken: skip"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_only_info_is_no_alert(kind: str) -> None:
    for severity, alert in (("info", False), ("warning", True), ("error", True)):
        assert Event.from_dict({"step": 0, "kind": kind, "severity": severity}).is_alert is alert
