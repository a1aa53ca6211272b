"""The private names of the hosts that a run needs, as data, and the search for those that a release lacks.

``compat/__init__.py`` has the policy that asks. A test holds this table to the names that ``compat/`` uses.
"""

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any

#: By what a run needs ("torch" is needed by every run, "torch:sharding" by FSDP2 and FSDP1 alone): the owners
#: ("module" or "module:Class", or two such alternatives "new|old") and the names that are used of each. A name of a
#: class may be an attribute that only its methods set.
PRIVATE_NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "torch": "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _foreach_copy_ _foreach_mul_"
        " _foreach_norm",
        "torch._C": "_current_autograd_node _current_graph_task_id _disabled_torch_function_impl"
        " _get_mkldnn_enabled _set_mkldnn_enabled",
        "torch:Tensor": "_make_wrapper_subclass _version",
        "torch._functorch.config": "backward_pass_autocast",
        "torch._guards:TracingContext": "try_get",
        "torch._ops": "OpOverload OpOverloadPacket",
        "torch._ops:OpOverload": "_schema",
        "torch.amp.grad_scaler": "OptState",
        "torch.amp:GradScaler": "_growth_tracker _per_optimizer_states _scale",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "CheckpointImpl CheckpointWrapper",
        "torch.distributed.checkpoint.fsspec_filesystem|torch.distributed.checkpoint._fsspec_filesystem": "FsspecReader"
        " FsspecWriter",
        "torch.distributed.checkpoint.default_planner": "_EmptyStateDictLoadPlanner",
        "torch.distributed.checkpoint.state_dict_loader": "_load_state_dict",
        "torch.nn.modules.batchnorm": "_BatchNorm",
        "torch.nn:Module": "_apply _buffers _forward_hooks _forward_pre_hooks _load_from_state_dict _modules"
        " _non_persistent_buffers_set",
        "torch.nn:MultiheadAttention": "_reset_parameters",
        "torch.optim:Optimizer": "_optimizer_step_pre_hooks",
        "torch.optim.lr_scheduler:SequentialLR": "_last_lr _schedulers",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.utils._pytree": "tree_leaves",
    },
    "torch:sharding": {
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": "_init_extensions _module_info"
        " _contiguous_orig_stride _sharded_local_tensor _unsharded_dtensor_spec _unsharded_param all_gather_outputs"
        " fsdp_placement init_dtype_attrs init_unsharded_param mesh_info param_dtype sharded_param sharded_size"
        " unsharded_accumulated_grad",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": "_reshard_after_forward_event"
        " _to_sharded _to_unsharded _training_state device_handle fsdp_params is_sharded is_unsharded post_backward"
        " post_forward unshard wait_for_unshard",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_is_root _lazy_init _mp_policy _pre_backward"
        " _pre_forward _training_state",
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
        "torch:UntypedStorage": "_cdata",
        "torch.distributed.fsdp._dynamo_utils": "_is_fsdp_managed_module",
        "torch.distributed.fsdp:FullyShardedDataParallel": "_flat_param _fsdp_wrapped_module _handle",
        "torch.distributed.fsdp._flat_param:FlatParameter": "_params",
        "torch.distributed.fsdp._flat_param:FlatParamHandle": "_full_param_padded _local_shard _param_infos"
        " _shard_param_infos _training_state flat_param is_sharded rank reshard uses_sharded_strategy",
        "torch.distributed.tensor:DTensor": "_local_tensor",
        "torch.nn:Module": "_parameters",
        "torch:Tensor": "_backward_hooks _post_accumulate_grad_hooks",
        "torch.nn.utils.clip_grad": "_get_total_norm",
        "torch.distributed.distributed_c10d": "_set_pg_timeout",
        "torch.nn.utils.convert_parameters": "_check_param_device",
    },
    "torch:ddp": {
        "torch.distributed": "_register_comm_hook",
        "torch.nn.parallel:DistributedDataParallel": "_comm_hooks _sync_buffers",
    },
    "torch:fake": {
        "torch:UntypedStorage": "_cdata",
        "torch.ops:aten": "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _local_scalar_dense"
        " _pin_memory _to_copy",
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.utils._python_dispatch": "_disable_current_modes",
        "torch.utils._pytree": "tree_leaves tree_map",
    },
    "lightning": {
        "{lightning}:Trainer": "_accelerator_connector _checkpoint_connector",
        "{lightning}:LightningModule": "_compiler_ctx _dtype _trainer",
        "{lightning}.callbacks:RichProgressBar": "_get_train_description",
        "{lightning}.loops.evaluation_loop:_EvaluationLoop": "_data_source",
        "{lightning}.loops.fit_loop:_FitLoop": "_data_fetcher _should_accumulate",
        "{lightning}.loops.training_epoch_loop:_TrainingEpochLoop": "_batches_that_stepped _build_kwargs",
        "{lightning}.strategies:DDPStrategy": "_ddp_comm_hook _ddp_comm_wrapper _layer_sync",
        "{lightning}.strategies:ModelParallelStrategy": "_device_mesh",
        "{lightning}.trainer.connectors.accelerator_connector:_AcceleratorConnector": "_precision_plugin_flag"
        " _strategy_flag",
        "{lightning}.trainer.connectors.checkpoint_connector:_CheckpointConnector": "_ckpt_path _hparams_name",
    },
    "deepspeed": {
        "torch._C._nn": "linear",
        "deepspeed.runtime.engine:DeepSpeedEngine": "_cast_module_mixed_precision _get_ckpt_name was_step_applied",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": "fp16_groups fp32_partitioned_groups_flat",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": "_link_all_hp_params"
        " _restore_from_bit16_weights _update_model_bit16_weights bit16_groups bit16_groups_flat"
        " parallel_partitioned_bit16_groups real_dp_process_group single_partition_of_fp32_groups",
        "deepspeed.utils.mixed_precision_linkage": "_hp_mapping",
    },
    "torchao": {
        "torchao.float8._inductor_patch": "_patch_inductor_min_max_codegen",
        "torchao.prototype.moe_training.mxfp8_linear": "_to_mxfp8_then_scaled_mm",
        "torchao.float8.float8_training_tensor:Float8TrainingTensor": "_data _scale",
        "torchao.float8.float8_training_tensor": "GemmInputRole LinearMMConfig ScaledMMConfig",
    },
    "transformers": {
        "transformers:PreTrainedModel": "_init_weights _keep_in_fp32_modules _keep_in_fp32_modules_strict"
        " _no_split_modules",
    },
}


def missing_names(need: str) -> list[str]:
    """Return the dotted names of ``PRIVATE_NAMES[need]`` that the installed release lacks.

    The modules of the names are imported, without their deprecation warnings.
    """
    missing = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owners, names in _owners_of(need):
            for name in names.split():
                if not any(_has(owner, name) for owner in owners.split("|")):
                    missing.append(f"{owners.partition('|')[0].replace(':', '.')}.{name}")
    return missing


def _owners_of(need: str) -> Iterator[tuple[str, str]]:
    # Lightning has two names. Both are of one release, so any that is imported, or installed, will do.
    imported = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    installed = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
    lightning = [*imported, installed][0]
    for owner, names in PRIVATE_NAMES[need].items():
        yield owner.replace("{lightning}", lightning), names


def _has(owner: str, name: str) -> bool:
    """True if ``owner`` is there and has ``name``, or one of its methods uses ``name`` of its instances."""
    module, _, attribute = owner.partition(":")
    try:
        value: Any = import_module(module)
    except ImportError:
        return False
    if attribute:
        value = getattr(value, attribute, None)
    if hasattr(value, name):
        return True
    if not isinstance(value, type):
        return name in _names_in(value)
    return any(name in _names_in(base) for base in value.__mro__)


def _names_in(owner: Any) -> set[str]:
    """Return the attributes that the functions, methods and properties of a class or a module use."""
    names = set[str]()
    for member in vars(owner).values():
        function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            names.update(code.co_names)
            names.update(constant for constant in code.co_consts if isinstance(constant, str))
    return names
