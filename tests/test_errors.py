"""Messages say what was given, what is allowed and what to do; errors travel between processes."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest

from lightning_mp import LossScaleError, MissingExtraError, NonFiniteError, PlanError
from lightning_mp.checkpoints import CheckpointFormatError
from lightning_mp.errors import Fault, Faults

FAULTS = (Fault("x=1", allowed="2", fix="write 2"), Fault("y='a'", allowed="'b'", fix="choose 'b'"))


@pytest.mark.parametrize(
    ("fault", "read"),
    [
        (FAULTS[0], "Got x=1. Allowed: 2. Write 2."),
        (Fault("x=1", allowed="2", fix="did you mean 'y'?"), "Got x=1. Allowed: 2. Did you mean 'y'?"),
        (Fault("x=1", allowed="2", fix="x=2 is the default"), "Got x=1. Allowed: 2. x=2 is the default."),
    ],
)
def test_a_fault_reads_as_sentences_with_the_fix_last(fault: Fault, read: str) -> None:
    assert str(fault) == read


ERRORS: dict[str, Exception] = {
    "PlanError": PlanError(FAULTS, "Pin"),
    "NonFiniteError": NonFiniteError("bad", rank=1, step=2, module="m", parameter="m.w"),
    "LossScaleError": LossScaleError("bad", rank=0, step=3),
    "CheckpointFormatError": CheckpointFormatError("a", "b", "c"),
    "MissingExtraError": MissingExtraError("peft", "hf", "LoRA"),
}


@pytest.mark.parametrize(
    "travel", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "deepcopy", "pickle"]
)
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_arrives_as_it_left(error: Exception, travel: Callable[[Exception], Exception]) -> None:
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_missing_extra_names_the_command() -> None:
    said = str(ERRORS["MissingExtraError"])
    packages = " ".join(rf"'{name}\S+'" for name in ("peft", "safetensors", "tokenizers", "transformers"))
    assert re.fullmatch(rf"LoRA needs peft\. Install it: pip install {packages}", said)
    assert ERRORS["MissingExtraError"].name == "peft"  # type: ignore[attr-defined]


def test_faults_are_collected_and_raised_together_and_hide_no_other_error() -> None:
    faults = Faults("Pin")
    faults.raise_if_any()
    faults.add("x=1", allowed="2", fix="write 2")
    faults.extend(FAULTS[1:])
    with pytest.raises(PlanError) as error, faults:
        pass
    assert (error.value.faults, error.value.subject) == (FAULTS, "Pin")
    assert str(error.value).startswith("Pin: 2 errors.\n")
    assert all(f"{number}. {fault}" in str(error.value) for number, fault in enumerate(FAULTS, start=1))
    with pytest.raises(KeyError), faults:
        raise KeyError("other")
