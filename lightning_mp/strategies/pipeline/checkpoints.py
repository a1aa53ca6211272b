"""One file with the plain model's names, whatever the number of stages: gathered on rank 0, cut again when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import Kind, by_parameter
from lightning_mp.compat.lightning import LightningOptimizer
from lightning_mp.modules.remote import is_remote
from lightning_mp.strategies.checkpoint_io import PortableCheckpoints, load_states, sharded_like
from lightning_mp.strategies.sharding import whole_on_cpu

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lightning_mp.strategies.pipeline.stages import Cut


class PipelineCheckpoints(PortableCheckpoints):
    """Saves what one process would have saved, and loads what any strategy has."""

    own_formats: frozenset[Kind] = frozenset()
    if TYPE_CHECKING:
        _cut: Cut | None

        @property
        def stage_group(self) -> ProcessGroup: ...
        @property
        def replica_group(self) -> ProcessGroup: ...
        def _share_buffers(self) -> None: ...

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of all stages on the CPU of rank 0; those of this rank on others."""
        self._share_buffers()
        module, cut = self.lightning_module, self._cut
        assert module is not None
        assert cut is not None
        rank, size = dist.get_rank(self.stage_group), self.stage_group.size()
        homes = {**cut.buffers, **cut.parameters}
        every = module.state_dict()
        mine = {
            name: value
            for name, value in every.items()
            if homes.get(name, -1) % size == rank or homes.get(name, -1) < 0
        }
        whole = self._gathered({name: whole_on_cpu(value) for name, value in mine.items()})
        return {name: whole[name] for name in every if name in whole}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state for all parameters on rank 0, numbered as a plain model's optimizer numbers them."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        content = by_parameter(plain.state_dict(), plain, _local)
        return {**content, "state": self._gathered(content["state"])}

    def _gathered(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """On rank 0, what every stage of the first replica has; on others their own. One stage travels at a time."""
        group = self.stage_group
        if dist.get_rank(self.replica_group) > 0:
            return mine
        whole = dict(mine)
        for rank in range(1, group.size()):
            if dist.get_rank(group) == rank:
                dist.send_object_list([mine], dst=dist.get_global_rank(group, 0), group=group, device=self.root_device)
            elif dist.get_rank(group) == 0:
                received: list[Any] = [None]
                source = dist.get_global_rank(group, rank)
                dist.recv_object_list(received, src=source, group=group, device=self.root_device)
                whole = {**received[0], **whole}
        return dict(sorted(whole.items())) if all(isinstance(key, int) for key in whole) else whole

    def load_full(self, checkpoint: dict[str, Any]) -> None:
        """Load this rank's part of the weights, and while fitting of the optimizer states.

        Raises:
            RuntimeError: under ``strict_loading``, names that the checkpoint or the module lacks.
        """
        module = self.lightning_module
        assert module is not None
        full: dict[str, Any] = checkpoint.pop("state_dict")
        here: dict[str, Any] = module.state_dict()
        missing, unexpected = sorted(here.keys() - full.keys()), sorted(full.keys() - here.keys())
        if module.strict_loading and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {missing}, unexpected keys "
                f"{unexpected}"
            )
        gone = {name for name, one in module.named_parameters(remove_duplicate=False) if is_remote(one)}
        kept = {name: sharded_like(here.get(name), value) for name, value in full.items() if name not in gone}
        module.load_state_dict(kept, strict=False)
        load_states(self.optimizers, checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """They were loaded with the weights."""


def _local(parameter: Tensor | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if parameter is None or is_remote(parameter):
        return None
    return {key: whole_on_cpu(value) for key, value in values.items()}
