"""peft's adapters under ZeRO-3: merging one into its layer gathers the weights that it needs."""

from typing import Any, cast

from torch import nn

from lightning_mp.compat.deepspeed import gathered_to_write, is_partitioned
from lightning_mp.modules.patterns import Swapped, swap_in

#: what peft's layers have, whatever kind of adapter they hold
_OF_ADAPTERS = ("merge", "unmerge", "base_layer", "merged_adapters")


class GathersToMerge(Swapped):
    """A peft layer that gathers its weights while an adapter is merged into it or taken out.

    ``merge`` and ``unmerge`` are collectives. Between forward passes ZeRO-3 leaves empty tensors.
    peft alone would merge nothing into them, and raise no error.
    """

    def merge(self, *args: Any, **kwargs: Any) -> Any:
        """Merge as peft does."""
        with gathered_to_write(cast("nn.Module", self)):
            return cast("Any", super()).merge(*args, **kwargs)

    def unmerge(self, *args: Any, **kwargs: Any) -> Any:
        """Take merged adapters out as peft does."""
        with gathered_to_write(cast("nn.Module", self)):
            return cast("Any", super()).unmerge(*args, **kwargs)


def gather_to_merge(module: nn.Module) -> None:
    """Have peft's layers below ``module`` gather split weights to merge; also after the run, as they stay split."""
    for part in list(module.modules()):
        if all(hasattr(part, name) for name in _OF_ADAPTERS) and any(map(is_partitioned, part.parameters())):
            swap_in(part, GathersToMerge)
