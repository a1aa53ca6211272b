"""Lightning's single file, from real runs on one device: read whole, and consolidated."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_mp import MixedPrecisionPlan
from lightning_mp.checkpoints import CheckpointFormatError, consolidate, kind_of, read_full
from support.models import Regression, same_weights
from support.running import fit
from support.saved import Held, Net, full_state
from support.saving import SaveAt

WRITTEN = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def _saved(folder: Path, module: Any, *plans: Any) -> Path:
    fit(module, callbacks=[SaveAt(folder, 8)], plugins=list(plans))
    return folder / "8.ckpt"


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, held: Held) -> Path:
    return _saved(tmp_path_factory.mktemp("single"), held, MixedPrecisionPlan("bf16-mixed"))


def _loaded(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def test_a_file_is_read_as_it_is(saved: Path, held: Held) -> None:
    full, plain = read_full(saved), torch.load(saved, weights_only=True)
    assert full.keys() == plain.keys()
    assert same_weights(full["state_dict"], full_state(held))
    assert full["optimizer_states"][0]["param_groups"] == plain["optimizer_states"][0]["param_groups"]
    assert full["lr_schedulers"] == plain["lr_schedulers"]


def test_a_file_of_a_newer_format_version_is_answered_with_a_sentence(saved: Path, tmp_path: Path) -> None:
    content, copy = torch.load(saved, weights_only=True), tmp_path / "copy.ckpt"
    torch.save({**content, "lightning_mp": {"format_version": 2}}, copy)
    with pytest.raises(CheckpointFormatError, match=r"has format version 2.* Update lightning-mp"):
        read_full(copy)
    state = {**content["MixedPrecisionPlan"], "fp32": {}, "format_version": 2}
    torch.save({**content, "MixedPrecisionPlan": state}, copy)
    with pytest.raises(
        CheckpointFormatError, match=r"The plan's state in .* has format version 2.* Update lightning-mp"
    ):
        consolidate(copy, tmp_path / "half.pt", dtype="bf16")
    assert consolidate(copy, tmp_path / "half.pt", dtype="bf16", cast_all=True).exists()


def test_objects_are_read_only_on_request(tmp_path: Path) -> None:
    class WithObject(Regression):
        def __init__(self, rate: Fraction = Fraction(1, 2)) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = _saved(tmp_path, WithObject())
    for reader in (read_full, lambda p: consolidate(p, tmp_path / "out.pt")):
        with pytest.raises(CheckpointFormatError, match="pass weights_only=False"):
            reader(path)
    assert read_full(path, weights_only=False)["hyper_parameters"]["rate"] == Fraction(1, 2)
    assert consolidate(path, tmp_path / "out.pt", weights_only=False).exists()


def test_what_is_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("text", "short", "safe", "plain", "list")}
    files["text"].write_text("hello")
    files["short"].write_bytes(saved.read_bytes()[:2000])
    save_file({"a": torch.zeros(2)}, files["safe"])
    torch.save({"a": torch.zeros(2)}, files["plain"])
    torch.save([1], files["list"])
    for name, says in {"plain": "without 'state_dict'", "list": "holds a list"}.items():
        with pytest.raises(CheckpointFormatError, match=says):
            read_full(files[name])
    for name in ("text", "short", "safe"):
        with pytest.raises(CheckpointFormatError, match=r"torch\.save did not write it, or not to its end"):
            read_full(files[name])


@pytest.mark.parametrize("suffix", WRITTEN)
def test_the_output_is_names_and_tensors_only(saved: Path, held: Held, tmp_path: Path, suffix: str) -> None:
    path = consolidate(str(saved), tmp_path / "new" / f"weights{suffix}")
    assert path == tmp_path / "new" / f"weights{suffix}"
    assert same_weights(_loaded(path), full_state(held))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    held.load_state_dict(_loaded(path), strict=True)


DTYPES = {"bf16": torch.bfloat16, torch.bfloat16: torch.bfloat16, "torch.float16": torch.float16, "FP32": torch.float32}


def test_only_floating_tensors_are_cast(saved: Path, held: Held, tmp_path: Path) -> None:
    for dtype, wanted in DTYPES.items():
        tensors = _loaded(consolidate(saved, tmp_path / "w.safetensors", dtype))
        assert tensors.pop("model.calls").dtype == torch.int64
        assert same_weights(tensors, {name: full_state(held)[name].to(wanted) for name in tensors})


def test_a_prefix_selects_and_is_taken_off(saved: Path, held: Held, tmp_path: Path) -> None:
    for prefix in ("model.", "model"):
        Net().load_state_dict(_loaded(consolidate(saved, tmp_path / "w.pt", prefix=prefix)), strict=True)
    inner = _loaded(consolidate(saved, tmp_path / "w.pt", prefix="model.first"))
    assert same_weights(inner, full_state(held.model.first))


def test_tied_tensors_share_in_torchs_file_and_are_copies_in_safetensors(saved: Path, tmp_path: Path) -> None:
    plain = _loaded(consolidate(saved, tmp_path / "w.pt", "bf16"))
    safe = _loaded(consolidate(saved, tmp_path / "w.safetensors", "bf16"))
    tied, twin = "model.tied.weight", "model.twin.weight"
    assert plain[tied].data_ptr() == plain[twin].data_ptr()
    assert safe[tied].data_ptr() != safe[twin].data_ptr()
    assert same_weights(plain, safe)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_checkpoint_is_not_written_over_itself(saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    (tmp_path / "w.pt").mkdir()
    for output in (saved.parent / "." / saved.name, tmp_path / "w.pt"):
        with pytest.raises(CheckpointFormatError, match="a folder or the checkpoint itself"):
            consolidate(saved, output)
    assert saved.read_bytes() == before


def test_a_failure_leaves_the_old_file_alone(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.pt").write_text("old")

    def fails(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        consolidate(saved, tmp_path / "w.pt")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_transformers_loads_what_is_under_model(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from support import language

    for name, model in {"tied": language.llama(tie_word_embeddings=True), "own": language.llama()}.items():
        folder, checkpoint = tmp_path / name, tmp_path / name / "4.ckpt"
        fit(language.Language(model), data=language.tokens(), callbacks=[SaveAt(folder, 4)])
        state = torch.load(consolidate(checkpoint, folder / "w.bin", prefix="model."), weights_only=True)
        consolidate(checkpoint, folder / "hub" / "model.safetensors", prefix="model.")
        model.config.save_pretrained(folder / "hub")
        for path, given in ((None, {"config": model.config, "state_dict": state}), (folder / "hub", {})):
            loaded, info = LlamaForCausalLM.from_pretrained(
                path, **given, output_loading_info=True, dtype=torch.float32
            )
            assert not any(info.values()), info
            assert same_weights(full_state(loaded), full_state(model))


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


SHARDED = (".metadata", "meta.pt", "__0_0.distcp")
DEEPSPEED = ("latest", "global_step7/mp_rank_00_model_states.pt")


def test_the_three_formats(tmp_path: Path) -> None:
    deepspeed = _touch(tmp_path / "c.ckpt", *DEEPSPEED)
    (deepspeed / "latest").write_text("global_step7\n")
    assert kind_of(_touch(tmp_path, "a.ckpt") / "a.ckpt") == "file"
    assert kind_of(str(_touch(tmp_path / "b.ckpt", *SHARDED))) == "sharded"
    assert kind_of(deepspeed) == "deepspeed"
    assert kind_of(_touch(tmp_path / "d.ckpt", "checkpoint/mp_rank_00_model_states.pt")) == "deepspeed"


@pytest.mark.parametrize(
    ("names", "path", "says"),
    [
        ((), "x.ckpt", "which does not exist"),
        (("a.txt",), "", "is no checkpoint, or not all of one"),
        (SHARDED[1:], "", "is no checkpoint, or not all of one"),
        (DEEPSPEED, "", "its folder '' has no file *_model_states.pt"),
        (DEEPSPEED, "global_step7", "is no checkpoint, or not all of one"),
    ],
)
def test_what_is_none_of_them_is_refused(tmp_path: Path, names: tuple[str, ...], path: str, says: str) -> None:
    place = _touch(tmp_path / "given", *names) / path
    with pytest.raises(CheckpointFormatError) as caught:
        kind_of(place)
    assert says in str(caught.value)
    assert repr(str(place)) in str(caught.value)
    assert "\n" not in str(caught.value)
