"""Text to tokens: a byte-level BPE trained on the very text, kept in the user's cache, and the validation split."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_mp.demo.inputs import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_mp.demo.text import Text

# Part of the cache key: a change in how tokens are made must not read what an older version wrote.
_FORMAT = b"1"
_VALIDATION_SHARE = 0.05
# Windows of context + 1 tokens that each side of the split needs at the very least.
_MIN_TRAIN_WINDOWS = 3
_MIN_VAL_WINDOWS = 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids (uint16) to train on and to validate on; ``digest`` identifies text and vocabulary."""

    train: NDArray[np.uint16]
    val: NDArray[np.uint16]
    digest: str
    cached: bool


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/lightning_mp``, or ``~/.cache/lightning_mp``, or a temporary folder without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "lightning_mp"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "lightning_mp"


def make_corpus(text: Text, vocab: int, context: int, folder: Path) -> Corpus:
    """Tokens of ``text`` under a BPE of at most ``vocab`` entries; the last 5 % are for validation.

    A cache entry in ``folder`` is used where there is a sound one, and written otherwise; a folder that cannot be
    written only costs the two seconds of doing it again.

    Raises:
        InputError: the text has too few tokens for windows of ``context``.
    """
    digest = _digest(text, vocab)
    path = folder / f"bpe-{digest[:24]}.npz"
    tokens = _load(path, vocab)
    cached = tokens is not None
    if tokens is None:
        tokens = _encode(text, vocab)
        with contextlib.suppress(OSError):
            _store(path, tokens)
    train, val = _split(tokens, context, text)
    return Corpus(train, val, digest, cached)


def _digest(text: Text, vocab: int) -> str:
    digest = hashlib.sha256(_FORMAT + str(vocab).encode())
    for document in text.documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _encode(text: Text, vocab: int) -> NDArray[np.uint16]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # tokenizers' classes come from a compiled module whose stubs leave the constructors untyped
    byte_level: Any = pre_tokenizers.ByteLevel
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=byte_level.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text.documents, trainer)
    encoded = tokenizer.encode_batch(list(text.documents), add_special_tokens=False)
    return np.concatenate([np.asarray(document.ids, dtype=np.uint16) for document in encoded])


def _load(path: Path, vocab: int) -> NDArray[np.uint16] | None:
    """The tokens of a cache entry; ``None`` where there is none or it is damaged (the zip's own checksum tells)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
            tokens: Any = entry["tokens"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    sound = tokens.dtype == np.uint16 and tokens.ndim == 1 and tokens.size > 0 and int(tokens.max()) < vocab
    return tokens if sound else None


def _store(path: Path, tokens: NDArray[np.uint16]) -> None:
    """Write a cache entry in one step, so that a run that is stopped leaves the old entry or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, tokens=tokens)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _split(tokens: NDArray[np.uint16], context: int, text: Text) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    window = context + 1
    least = (_MIN_TRAIN_WINDOWS + _MIN_VAL_WINDOWS) * window
    if tokens.size < least:
        raise InputError(
            f"text of {tokens.size} tokens ({text.source})",
            f"at least {least} tokens, some {least * 4 // 1000 + 1} kB",
            "give a longer text, or leave --text out",
        )
    held_out = max(int(tokens.size * _VALIDATION_SHARE), _MIN_VAL_WINDOWS * window)
    return tokens[:-held_out], tokens[-held_out:]
