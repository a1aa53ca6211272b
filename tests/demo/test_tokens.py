"""Tokens: real byte-pair encoding, a cache that is used, and repaired when damaged, and an honest split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_mp.demo.inputs import InputError
from lightning_mp.demo.text import Text
from lightning_mp.demo.tokens import cache_folder, make_corpus

WORDS = " ".join(f"alpha{number % 37} = beta({number % 11}) + gamma" for number in range(600))
TEXT = Text((WORDS, "naïve ünïcode € 漢字\n" * 40), "a test")


def test_tokens_are_cached_and_read_back_the_same(tmp_path: Path) -> None:
    first = make_corpus(TEXT, 400, 16, tmp_path)
    second = make_corpus(TEXT, 400, 16, tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert first.digest == second.digest
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.val, second.val)
    assert len(list(tmp_path.iterdir())) == 1  # no temporary file is left


def test_pairs_were_merged_and_ids_stay_in_the_vocabulary(tmp_path: Path) -> None:
    corpus = make_corpus(TEXT, 400, 16, tmp_path)
    tokens = np.concatenate([corpus.train, corpus.val])
    assert tokens.size < TEXT.size / 2
    assert 256 < tokens.max() < 400


def test_validation_is_the_end_of_the_text_and_shares_no_token_with_training(tmp_path: Path) -> None:
    short, long = make_corpus(TEXT, 400, 16, tmp_path), make_corpus(TEXT, 400, 64, tmp_path)
    total = short.train.size + short.val.size
    assert short.val.size == int(total * 0.05)
    assert total == long.train.size + long.val.size


@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage", "empty"])
def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    sound = make_corpus(TEXT, 400, 16, tmp_path)
    (entry,) = tmp_path.iterdir()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 0xFF
    broken = {"truncated": data[: len(data) // 2], "flipped": data, "garbage": b"not a zip", "empty": b""}[damage]
    entry.write_bytes(broken)
    again = make_corpus(TEXT, 400, 16, tmp_path)
    assert not again.cached
    np.testing.assert_array_equal(again.train, sound.train)
    assert make_corpus(TEXT, 400, 16, tmp_path).cached


def test_an_entry_of_another_kind_is_not_trusted(tmp_path: Path) -> None:
    sound = make_corpus(TEXT, 400, 16, tmp_path)
    (entry,) = tmp_path.iterdir()
    for tokens in (np.zeros(9, np.int64), np.full(9, 400, np.uint16), np.zeros((3, 3), np.uint16)):
        with entry.open("wb") as file:
            np.savez(file, tokens=tokens)
        again = make_corpus(TEXT, 400, 16, tmp_path)
        assert not again.cached
        np.testing.assert_array_equal(again.train, sound.train)


def test_another_text_or_vocabulary_has_its_own_entry(tmp_path: Path) -> None:
    digests = {
        make_corpus(TEXT, 400, 16, tmp_path).digest,
        make_corpus(TEXT, 401, 16, tmp_path).digest,
        # the same bytes, cut into documents elsewhere
        make_corpus(Text((WORDS[:-5], WORDS[-5:] + TEXT.documents[1]), "a test"), 400, 16, tmp_path).digest,
    }
    assert len(digests) == len(list(tmp_path.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    corpus = make_corpus(TEXT, 400, 16, in_the_way / "lightning_mp")
    assert not corpus.cached
    assert corpus.train.size > 0


def test_a_text_too_short_is_refused_with_the_length_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Got text of \d+ tokens \(a note\). Allowed: at least 516 tokens"):
        make_corpus(Text(("hello world",), "a note"), 400, 128, tmp_path)


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_mp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lightning_mp"
