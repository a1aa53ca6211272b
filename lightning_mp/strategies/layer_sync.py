"""``sync_batchnorm=True`` is the plan's to carry out: Lightning would replace the batch norms, pinned ones too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning_mp.compat.lightning import ParallelStrategy, TorchSyncBatchNorm

_Base = ParallelStrategy if TYPE_CHECKING else object


class PlanSyncsBatchNorm(_Base):
    """Shows the host no more than the layer synchronization of a user's own class; the plan sees all."""

    given_layer_sync: Any = None

    def _shown(self) -> Any:
        return None if type(self.given_layer_sync) is TorchSyncBatchNorm else self.given_layer_sync

    def _take(self, value: Any) -> None:
        self.given_layer_sync = value

    _layer_sync: Any = cast("Any", property(_shown, _take))
