"""Text as training data: windows of tokens of Python's own sources, or of a file or folder, without a network."""

import os
import re
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.compat.lightning import LightningDataModule
from lightning_mp.errors import MissingExtraError, PlanError

# Enough for hundreds of steps without seeing a token twice on a CPU, and tokenized in two seconds.
MAX_BYTES = 4_000_000
# Tests and installed packages are no part of the language's library; encodings and pydoc_data are tables and
# generated prose, which a model learns at once and which would drown the code.
_SKIPPED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)
_VALIDATION_SHARE = 0.05
# the words into which tokenizers' byte level cuts ASCII
_WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)


class TextWindows(LightningDataModule):
    """Windows of ``context + 1`` tokens (int64) of a text, side by side; training shuffles them.

    Args:
        text: a UTF-8 file or a folder. ``None``: the sources of the running Python's standard library.
        vocab: entries of the byte-pair encoding, which is trained on the text itself.
        context: tokens of a model's input; a batch is (batch_size, context + 1).
        batch_size: windows a batch.
        val_batches: the largest number of batches of the held-out 5 %; ``None``: all of them.
        num_workers: processes that load, as in ``DataLoader``.

    Raises:
        PlanError: no text is there, or too little for windows of ``context``.
        MissingExtraError: tokenizers is not installed.
    """

    def __init__(
        self,
        text: str | None = None,
        vocab: int = 512,
        context: int = 64,
        batch_size: int = 8,
        val_batches: int | None = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self._documents = documents_of(text)
        self._vocab, self._context = vocab, context
        self._batch_size, self._val_batches, self._num_workers = batch_size, val_batches, num_workers
        self._train = self._val = torch.empty(0, context + 1, dtype=torch.int64)

    def setup(self, stage: str) -> None:
        """Tokenize, and cut the windows."""
        tokens, window = encoded(self._documents, self._vocab), self._context + 1
        least = 4 * window  # for training and validation together
        if tokens.numel() < least:
            said = f"the text has {tokens.numel()} tokens, and windows of {window} need at least {least} tokens"
            raise PlanError.of(said, "give a longer text", "TextWindows")
        held_out = max(int(tokens.numel() * _VALIDATION_SHARE), window)
        train, val = tokens[:-held_out], tokens[-held_out:]
        self._train, self._val = (part.unfold(0, window, self._context) for part in (train, val))
        if self._val_batches is not None:
            self._val = self._val[: self._val_batches * self._batch_size]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows of the training text."""
        return self._loader(self._train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Windows of the held-out text, in order."""
        return self._loader(self._val)

    def _loader(self, windows: Any, **options: Any) -> DataLoader[Tensor]:
        return DataLoader(windows, batch_size=self._batch_size, num_workers=self._num_workers, **options)


@lru_cache(maxsize=2)
def encoded(documents: tuple[str, ...], vocab: int) -> Tensor:
    """Return the token ids (int64) of the documents, by a byte-level BPE of ``vocab`` entries trained on them."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "hf", "the byte-pair encoding of a text") from error
    # tokenizers' classes come from a compiled module whose stubs leave the constructors untyped
    byte_level: Any = pre_tokenizers.ByteLevel
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=byte_level.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    # Each word is encoded once. A document that is not ASCII counts as one word.
    cut = [_WORD.findall(document) if document.isascii() else [document] for document in documents]
    words = list(dict.fromkeys(chain.from_iterable(cut)))
    ids = {
        word: one.ids for word, one in zip(words, tokenizer.encode_batch(words, add_special_tokens=False), strict=True)
    }
    flat = chain.from_iterable(ids[word] for document in cut for word in document)
    return torch.from_numpy(np.fromiter(flat, np.int64))  # a third of the time that a list takes


def _sources(folder: Path) -> Iterator[Path]:
    for home, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # os.walk leaves out the others
        yield from (Path(home, name) for name in names if name.endswith(".py"))


def documents_of(text: str | None) -> tuple[str, ...]:
    """Return the texts of a file or a folder, ``MAX_BYTES`` at most; files of a folder in sorted order.

    Hidden files, and files that are not UTF-8, are left out. ``None`` reads the ``.py`` files of the running Python's
    standard library. The last text is cut between two characters.

    Raises:
        PlanError: the path does not exist, or has no text.
    """
    folder = Path(sysconfig.get_path("stdlib") if text is None else text)
    paths = _sources(folder) if text is None else folder.rglob("*") if folder.is_dir() else [folder]
    documents: list[str] = []
    left = MAX_BYTES
    for names, path in sorted((path.relative_to(folder).parts, path) for path in paths):
        hidden = any(name.startswith(".") or name == "__pycache__" for name in names)
        if hidden or left < 4 or not path.is_file():
            continue
        with suppress(OSError, UnicodeDecodeError):
            with path.open("rb") as file:
                data = file.read(left + 1)
            # The last character may be cut if the file is longer.
            text = getincrementaldecoder("utf-8")().decode(data[:left], final=len(data) <= left)
            if "\0" not in text and text and not text.isspace():
                documents.append(text)
                left -= len(text.encode())
    if not documents:
        said = "has no UTF-8 text" if folder.exists() else "does not exist"
        raise PlanError.of(f"text {folder} {said}", "check the path, or leave it out", "TextWindows")
    return tuple(documents)
