"""Text as training data: windows of tokens, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.compat.lightning import LightningDataModule
from lightning_mp.demo import text as texts
from lightning_mp.demo.tokens import cache_folder, make_corpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def windows(tokens: NDArray[np.uint16], context: int, step: int | None = None) -> Tensor:
    """All windows of ``context + 1`` tokens (int64), one every ``step``; by default each takes up where one ends."""
    return torch.from_numpy(tokens.astype("int64")).unfold(0, context + 1, step or context)


class TextWindows(LightningDataModule):
    """Windows of ``context + 1`` tokens (int64) of a text, side by side; training shuffles them.

    Args:
        text: a file or a folder of text; ``None`` is the source of the running Python's standard library.
        vocab: entries of the byte-pair encoding that is trained on the text, and kept in the user's cache.
        context: tokens that a model sees; a batch is (batch_size, context + 1).
        batch_size: windows a batch.
        val_batches: batches of the held-out 5 % at most; ``None`` is all of them.
        num_workers: processes that load, as in ``DataLoader``.

    Raises:
        InputError: no text is there, or too little for windows of ``context``.
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
        self._text = texts.standard_library() if text is None else texts.from_path(Path(text))
        self._vocab, self._context = vocab, context
        self._batch_size, self._val_batches, self._num_workers = batch_size, val_batches, num_workers
        self._train = self._val = torch.empty(0, context + 1, dtype=torch.int64)

    def prepare_data(self) -> None:
        """Leave the tokens in the cache, from one process of a machine."""
        make_corpus(self._text, self._vocab, self._context, cache_folder())

    def setup(self, stage: str) -> None:
        """Cut the windows."""
        corpus = make_corpus(self._text, self._vocab, self._context, cache_folder())
        self._train, self._val = (windows(tokens, self._context) for tokens in (corpus.train, corpus.val))
        if self._val_batches is not None:
            self._val = self._val[: self._val_batches * self._batch_size]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows of the training text."""
        return self._loader(self._train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Windows of the held-out text, in order."""
        return self._loader(self._val, shuffle=False)

    def _loader(self, windows: Tensor, *, shuffle: bool) -> DataLoader[Tensor]:
        return DataLoader(
            windows,  # pyright: ignore[reportArgumentType]  a tensor has what a map-style dataset needs
            batch_size=self._batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self._num_workers,
        )
