"""Events and findings: how they are written and read."""

from __future__ import annotations

import json
import re

from lightning_mp.record.events import Event
from lightning_mp.record.findings import CODES
from lightning_mp.record.run_folder import to_json

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
        "(loss_scale 1,024). Likely cause: the product overflows in fp16. What to do: pin it to fp32. "
        "Action taken: skip"
    )


def test_every_code_is_stable_in_form_and_used_once() -> None:
    assert len(set(CODES.values())) == len(CODES)
    assert all(re.fullmatch(r"LMP\d{3}", code) for code in CODES.values())
