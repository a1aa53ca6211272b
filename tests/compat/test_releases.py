"""Which releases of the hosts run in silence, with a warning, or not at all; the policy stands in ``compat``."""

import warnings
from importlib.metadata import requires, version
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.callbacks import LossScaleMonitor
from lightning_mp.compat import HOSTS, _warn_once, check_versions, installed, is_untested
from lightning_mp.compat.private_names import PRIVATE_NAMES
from lightning_mp.errors import Faults
from support.models import Regression
from support.running import faults_of, fit

BOUNDS = [Requirement(line) for line in requires("lightning-mp") or ()]


def install(monkeypatch: pytest.MonkeyPatch, name: str, release: str) -> None:
    """Have the package metadata name another release; the code of the host stays what it is."""
    monkeypatch.setattr("lightning_mp.compat.installed", lambda asked: release if asked == name else installed(asked))
    _warn_once.cache_clear()


@pytest.mark.parametrize("name", HOSTS)
def test_the_bounds_of_the_policy_are_those_of_the_package(name: str) -> None:
    assert {bound.specifier for bound in BOUNDS if bound.name == name} == {SpecifierSet(HOSTS[name].bounds)}
    if name == "torchao" and find_spec(name) is None:
        pytest.skip("the oldest releases are installed without it")
    assert version(name) in SpecifierSet(HOSTS[name].bounds)
    assert not is_untested(Version(version(name)), HOSTS[name]), "raise Host.newest to what is tested"


def test_an_upper_bound_is_the_next_major_release_and_no_more() -> None:
    extras = ("test", "dev", "docs")
    hosts = [bound for bound in BOUNDS if not any(f'"{extra}"' in str(bound.marker) for extra in extras)]
    hosts = [bound for bound in hosts if bound.name != "lightning-mp"]
    assert {bound.name for bound in hosts} > {*HOSTS, "peft", "omegaconf", "hydra-core", "jsonargparse"}
    calendar = {"fsspec", "packaging"}  # their versions are dates
    for bound in (bound for bound in hosts if bound.name not in calendar):
        uppers = [part.version for part in bound.specifier if part.operator == "<"]
        assert len(uppers) == 1, f"{bound} has no upper bound"
        assert uppers[0].isdecimal(), f"{bound} excludes more than the next major release"


@pytest.mark.parametrize(
    ("name", "release"), [("torch", "2.10.1+cu128"), ("torch", "3.0.0a1"), ("lightning", "2.5.6"), ("lightning", "3.0")]
)
def test_a_release_out_of_bounds_is_refused(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name, release)
    bounds = HOSTS[name].bounds
    said = f"Got {name} {release}, which is not supported. Allowed: {name} {bounds}. Run pip install '{name}{bounds}'."
    starts = [
        lambda: MixedPrecisionPlan("16-mixed").convert_module(Regression()),
        lambda: make_strategy("ddp", MixedPrecisionPlan("bf16-mixed")),
        *([LossScaleMonitor] if name == "lightning" else []),
    ]
    for start in starts:
        assert [str(fault) for fault in faults_of(start)] == [said]


@pytest.mark.parametrize("release", ["2.11.0", "2.11.0a0+nv26.02", "2.13.0+cpu", "2.14.9"])
def test_a_release_from_the_oldest_to_the_newest_tested_one_runs_without_a_word(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "torch", release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MixedPrecisionPlan("bf16-mixed").convert_module(Regression())


def test_a_newer_release_that_has_every_private_name_runs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch", "2.99.1")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            fit(Regression(), plugins=[MixedPrecisionPlan("bf16-mixed")])
    said = [str(warning.message) for warning in warned]
    assert len([line for line in said if line.startswith("torch 2.99.1 is newer than 2.14, the newest release")]) == 1


def test_a_newer_release_that_lacks_a_private_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch", "2.99.1")
    monkeypatch.setitem(PRIVATE_NAMES["torch"], "torch:Tensor", "_version _gone_in_this_release")
    monkeypatch.setitem(PRIVATE_NAMES["torch"], "torch.no_such_module", "anything")
    said = [str(fault) for fault in faults_of(lambda: MixedPrecisionPlan("bf16-mixed").convert_module(Regression()))]
    assert said == [
        f"This run needs {name}, which torch 2.99.1 does not have. "
        "Run pip install 'torch==2.14.*', the newest tested release."
        for name in ("torch.Tensor._gone_in_this_release", "torch.no_such_module.anything")
    ]


def test_names_that_a_run_does_not_need_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch", "2.99.1")
    monkeypatch.setitem(PRIVATE_NAMES["torch:sharding"], "torch.no_such_module", "anything")
    with pytest.warns(UserWarning, match="newer than"):
        MixedPrecisionPlan("bf16-mixed").convert_module(Regression())
    faults = Faults()
    check_versions(faults, "torch:sharding")
    assert "torch.no_such_module.anything" in str(faults.found[0])
