"""DeepSpeed: engines from models, one optimizer step from many micro-batches, memory handed over between phases."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from spmdrl.config import DeepSpeedConfig, OptimizerConfig
from spmdrl.distributed import comm
from spmdrl.distributed.cpu_adam import cpu_adam_class
from spmdrl.distributed.engine_state import undo_empty_step
from spmdrl.distributed.offload import HostCopy
from spmdrl.distributed.step_gate import install_gate
from spmdrl.errors import UserError

# DeepSpeed would compile a shared-memory collective at start-up on hosts without a GPU: minutes for nothing, as the
# collectives here are large, and a build that was interrupted leaves a lock on which every later start waits for ever.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Strategy:
    """Everything between a plain torch model and its ZeRO-sharded training."""

    def __init__(self, config: DeepSpeedConfig, optim: OptimizerConfig, *, dtype: torch.dtype):
        self.config, self.optim, self.dtype = config, optim, dtype

    def for_role(self, *, zero_stage: int | None, adam_offload: bool | None = None) -> "Strategy":
        """For a role with settings of its own; None is the run's."""
        own = {"zero_stage": zero_stage, "adam_offload": adam_offload}
        config = replace(self.config, **{name: value for name, value in own.items() if value is not None})
        return Strategy(config, self.optim, dtype=self.dtype)

    # ---- construction -------------------------------------------------------------------------------------------
    def loading(self, *, frozen: bool = False) -> Any:
        """Context in which `from_pretrained` shards weights as it reads them, under ZeRO-3, to where they are to rest:
        those of a `frozen` model may do so in host memory."""
        if self.config.zero_stage < 3:
            return nullcontext()
        from transformers.integrations import HfDeepSpeedConfig

        return _alive(HfDeepSpeedConfig(self._ds_config(trainable=not frozen)))

    def trainable(self, model: nn.Module, *, learning_rate: float, total_steps: int, warmup_steps: int = 0) -> Any:
        """A DeepSpeed engine that trains `model` over `total_steps` optimizer steps."""
        from transformers import get_scheduler

        self._check_grad_accum_dtype()
        optimizer = self._optimizer(model, learning_rate)
        extra = {"min_lr_rate": self.optim.min_lr_ratio} if "with_min_lr" in self.optim.lr_scheduler else {}
        scheduler = get_scheduler(
            self.optim.lr_scheduler,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=extra,
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=self._ds_config(trainable=True)
        )
        undo_empty_step(engine)
        engine.step_gate, engine.host_copy = install_gate(engine, self.optim.max_norm), HostCopy(engine)
        engine.eval()
        return engine

    def _check_grad_accum_dtype(self) -> None:
        wanted, own = self.config.grad_accum_dtype, "bf16" if self.dtype == torch.bfloat16 else "fp32"
        if self.config.zero_stage == 0 and wanted not in (None, own):
            raise UserError(
                f"--grad_accum_dtype {wanted} needs --zero_stage 1, 2 or 3: without ZeRO DeepSpeed accumulates "
                f"gradients as it computes, here in {own}"
            )

    def frozen(self, model: nn.Module) -> nn.Module:
        """`model` for inference only: sharded under ZeRO-3, otherwise whole on this rank's device."""
        model.requires_grad_(False)
        model.eval()
        if self.config.zero_stage < 3:
            return model.to("cpu" if self.config.ref_reward_offload else comm.device())
        engine, *_ = deepspeed.initialize(model=model, config=self._ds_config(trainable=False))
        engine.eval()
        return engine

    def _optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        no_decay = [p for p in trained if _ndim(p) < 2]
        decay = [p for p in trained if _ndim(p) >= 2]
        groups = [{"params": decay, "weight_decay": self.optim.l2}, {"params": no_decay, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        kwargs: dict[str, Any] = {"lr": learning_rate, "betas": self.optim.adam_betas}
        if self.config.adam_offload:
            comm.say_idle_cores()
            return cpu_adam_class()(groups, adamw_mode=True, **kwargs)
        return torch.optim.AdamW(groups, fused=True, **kwargs)

    def _ds_config(self, *, trainable: bool) -> dict[str, Any]:
        stage = self.config.zero_stage if trainable else 3
        zero: dict[str, Any] = {
            "stage": stage,
            "overlap_comm": self.config.overlap_comm,
            # Elements, each in a buffer of its own for the whole run: DeepSpeed's default of 5e8 is 2 GB in fp32.
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
        }
        if stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 10_000,
                "stage3_prefetch_bucket_size": 50_000_000,
                "zero_hpz_partition_size": self.config.zpg,
            }
        if trainable and self.config.adam_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if not trainable and self.config.ref_reward_offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            # step() closes an optimizer step of any number of micro-batches; nothing is divided by their number.
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "steps_per_print": 10**9,
        }
        if trainable:
            config["gradient_clipping"] = self.optim.max_norm
            if self.config.grad_accum_dtype:
                config["data_types"] = {"grad_accum_dtype": self.config.grad_accum_dtype}
        return config

    # ---- training -----------------------------------------------------------------------------------------------
    @contextmanager
    def training(self, engine: Any) -> Iterator[None]:
        """Dropout and gradient checkpointing are on for the time of the block; scoring goes without."""
        engine.train()
        try:
            yield
        finally:
            engine.eval()

    def backward(self, engine: Any, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, this rank's share of a sum over all ranks.

        DeepSpeed averages gradients over ranks; the factor here, its only one, makes that a sum.
        """
        engine.backward(loss * comm.world_size())

    def step(self, engine: Any, accepts: Callable[[float], bool] = lambda norm: True) -> float:
        """Clip, update weights and learning rate; return the gradient norm before clipping.

        A step whose gradients are not finite (norm infinity), or whose norm `accepts` refuses, is not taken: its
        gradients are dropped, and weights, moments and schedule stay as they are. `accepts` must say the same on
        every rank, all of which ask it with the same norm.
        """
        engine.step_gate.open_for(accepts)
        engine.step()
        return engine.step_gate.norm

    # ---- memory phases --------------------------------------------------------------------------------------------
    @contextmanager
    def states_offloaded(self, engine: Any, *, enabled: bool, keeps_weights: bool = False) -> Iterator[None]:
        """The engine's training states, and its weights unless they are needed, in host memory while the device
        belongs to the engine that samples."""
        if not enabled or comm.device().type == "cpu":
            yield
            return
        with engine.host_copy.holds(comm.device().type, weights=not keeps_weights):
            yield

    @contextmanager
    def on_device(self, model: Any) -> Iterator[Any]:
        """`model` on the device for the time of the block, if it rests in host memory."""
        is_whole = isinstance(model, nn.Module) and unwrap(model) is model  # else DeepSpeed moves its shards
        rests_on_host = is_whole and self.config.ref_reward_offload and comm.device().type != "cpu"
        if rests_on_host:
            model.to(comm.device())
        try:
            yield model
        finally:
            if rests_on_host:
                model.to("cpu")
                torch.cuda.empty_cache()


def _ndim(param: nn.Parameter) -> int:
    return len(getattr(param, "ds_shape", param.shape))


@contextmanager
def _alive(value: Any) -> Iterator[Any]:
    """Keep `value` referenced for the time of the block (transformers holds the config by a weak reference)."""
    yield value


def unwrap(engine: Any) -> nn.Module:
    """The module inside a DeepSpeed engine, or the module itself."""
    return engine.module if hasattr(engine, "module") and hasattr(engine, "backward") else engine


def compute_dtype(bf16: bool | None) -> torch.dtype:
    """bf16 where the device computes in it natively, else fp32; `bf16` overrides."""
    if bf16 is None:
        bf16 = _device_has_bf16()
    elif bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("--bf16: this GPU has no bfloat16; leave the flag out to train in fp32")
    return torch.bfloat16 if bf16 else torch.float32


def _device_has_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
