"""Sampling with vLLM inside this process; the only module that imports vllm."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import RolloutConfig
from spmdrl.distributed import comm, preemption, whereabouts
from spmdrl.distributed.weight_sync import check_names
from spmdrl.errors import UserError, first_line
from spmdrl.models.loading import CheckpointWeights
from spmdrl.rollout.engine import Completion, Request, SamplingOptions

CPU_KV_CACHE_GB = 4
STEPS_BETWEEN_QUESTIONS = 32  # of a tensor-parallel group, whether one of its ranks is to stop


class VLLMEngine:
    """vLLM with the external launcher: the ranks that this trainer runs on are the engine's workers.

    With tensor parallelism the ranks of a group submit the group's pooled requests in the same order, since vLLM's
    schedulers run in lockstep there, and each takes its own share of the answers.
    """

    name = "vllm"
    own_forward = False

    def __init__(
        self,
        pretrain: str,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        max_len: int,
        max_samples: int,
        weights: CheckpointWeights,
        trust_remote_code: bool = False,
    ):
        self.weights, self.expected = weights, set(weights.names)
        self.tp = config.vllm_tensor_parallel_size
        self.group = comm.subgroup(self.tp) if self.tp > 1 else None
        self.can_sleep = config.vllm_enable_sleep and torch.cuda.is_available()
        self.memory_share = config.vllm_gpu_memory_utilization
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with _threads_kept(), _shared_memory_of_its_own(self.group):
            from vllm import LLM

            try:
                self.llm = LLM(
                    model=pretrain,
                    dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
                    tensor_parallel_size=self.tp,
                    distributed_executor_backend="external_launcher",
                    max_model_len=max_len,
                    max_num_seqs=min(max(max_samples, 1), 1024),
                    seed=comm.rank() // self.tp,
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=config.enable_prefix_caching,
                    enforce_eager=config.enforce_eager,
                    enable_sleep_mode=self.can_sleep,
                    gpu_memory_utilization=config.vllm_gpu_memory_utilization,
                    trust_remote_code=trust_remote_code,
                    disable_log_stats=True,
                    **self._cpu_options(config),
                )
            except (ValueError, NotImplementedError) as error:
                raise UserError(_refusal(pretrain, first_line(error))) from error

    @staticmethod
    def _cpu_options(config: RolloutConfig) -> dict[str, Any]:
        """Without a GPU the KV cache has a given size; "a share of the memory" would be taken by every rank."""
        if torch.cuda.is_available():
            return {}
        return {"kv_cache_memory_bytes": (config.vllm_kv_cache_gb or CPU_KV_CACHE_GB) * 2**30}

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[Completion]:
        pooled = comm.all_gather_object(list(requests), self.group) if self.group else [list(requests)]
        flat = [request for share in pooled for request in share]
        if not flat:
            return []
        prompts: Any = [{"prompt_token_ids": list(r.prompt_ids)} for r in flat]
        params = [_sampling_params(r, options) for r in flat]
        outputs = self._run(self.llm.enqueue(prompts, params, use_tqdm=False))
        mine = 0 if self.group is None else comm.rank() % self.tp
        start = sum(len(share) for share in pooled[:mine])
        return [_completion(out.outputs[0]) for out in outputs[start : start + len(pooled[mine])]]

    def _run(self, request_ids: list[str]) -> list[Any]:
        """vLLM's answers to these requests, all that it has, in their order; fewer when the run is to stop."""
        engine, outputs, num_steps = self.llm.llm_engine, [], 0
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
            num_steps += 1
            whereabouts.beat()
            if self._is_to_stop(num_steps):
                engine.abort_request(request_ids, internal=True)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _is_to_stop(self, num_steps: int) -> bool:
        """The ranks of a tensor-parallel group, whose engines step together, decide together."""
        if self.group is None:
            return preemption.requested()
        if num_steps % STEPS_BETWEEN_QUESTIONS:
            return False
        return any(comm.all_gather_object(preemption.requested(), self.group))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights in place. vLLM's layer-wise reload serves both its GPU and its CPU build, whose linear
        layers keep repacked weights only."""
        sent: set[str] = set()
        not_loaded = self.llm.collective_rpc(_reload, args=(self._checked(weights, sent),))
        check_names(sent, self.expected)
        if any(not_loaded):
            raise RuntimeError(f"weight sync: vLLM's own weights were not loaded: {sorted(not_loaded[0])[:8]}")

    def _checked(self, weights: Iterable[tuple[str, Tensor]], sent: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Weights as in files, which is how vLLM knows them. Records their own names; an unknown one never reaches
        vLLM, which would stop there without naming what is missing."""
        for name, tensor in weights:
            sent.add(name)
            if name in self.expected:
                yield from self.weights.in_files(name, tensor)

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self.can_sleep:
            self.llm.sleep(level=2)  # weights are sent anew before every generate, so none are kept on the host

    def wake_up(self, tags: Sequence[str]) -> None:
        """Raises UserError where the trainer has left too little of the device."""
        if not self.can_sleep:
            return
        try:
            self.llm.wake_up(tags=list(tags))
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            raise UserError(
                f"no room on the device for vLLM's {' and '.join(tags)} beside the trainer: lower "
                f"--vllm_gpu_memory_utilization, now {self.memory_share:g}, or what the trainer takes, with "
                "--zero_stage 3 or --ref_reward_offload"
            ) from error


def _refusal(pretrain: str, reason: str) -> str:
    """One line with a way out for what vLLM says when it cannot start."""
    lacks_memory = torch.cuda.is_available() and "memory" in reason.lower()
    remedy = "see --vllm_gpu_memory_utilization" if lacks_memory else "try --engine hf"
    return f"--engine vllm cannot run {pretrain}: {reason}; {remedy}"


def _reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
    """Runs on vLLM's worker: its `reload_weights`, but returns the names of its own weights that were not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.get_model()
    wanted = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config):
        _forget_packed_experts(model)
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
    _repack_tied(model)
    return set() if loaded is None else wanted - loaded


def _forget_packed_experts(model: Any) -> None:
    """The CPU build packs experts when it makes their kernel, and not in a reload, after which the kernel would read
    plain weights as packed ones. Without one it makes another."""
    if torch.cuda.is_available():
        return  # where graphs hold on to kernels, which read weights as they are
    for layer in model.modules():
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None


def _repack_tied(model: Any) -> None:
    """The CPU build multiplies by a packed copy of each weight. An LM head that is tied gets no weight of its own in
    a reload, so vLLM would leave its copy as it was."""
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and hasattr(layer, "quant_method"):
            owners.setdefault(id(layer.weight), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else []:
            layer.quant_method.process_weights_after_loading(layer)


def _sampling_params(request: Request, options: SamplingOptions) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=request.seed,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_tokens=options.min_new_tokens if options.min_new_tokens > 1 else 0,
        max_tokens=options.room_after(len(request.prompt_ids)),
        stop=list(options.stop) or None,
        include_stop_str_in_output=True,
        logprobs=0,
        detokenize=bool(options.stop),
        skip_special_tokens=False,  # a stop string may be one
    )


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    log_probs = [position[token].logprob for position, token in zip(output.logprobs, ids, strict=True)]
    assert output.finish_reason in ("stop", "length"), f"vLLM ended a request with {output.finish_reason!r}"
    return Completion(ids, log_probs, output.finish_reason)


class _threads_kept:
    """vLLM's CPU worker pins this process to its own idea of threads; training keeps the number it had."""

    def __enter__(self) -> None:
        self.count, self.set_count = torch.get_num_threads(), torch.set_num_threads

    def __exit__(self, *exc: Any) -> None:
        torch.set_num_threads = self.set_count
        torch.set_num_threads(self.count)


@contextmanager
def _shared_memory_of_its_own(group: Any) -> Iterator[None]:
    """On hosts without a GPU the ranks of an engine meet in shared memory that vLLM names after where they met, which
    is the same for every run under a launcher: runs would share it, and one that was killed would block all later
    ones. A word of their own keeps them apart."""
    if group is None or torch.cuda.is_available():
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    word, original = comm.all_gather_object(secrets.token_hex(8), group)[0], Executor._distributed_args
    Executor._distributed_args = lambda self: (f"env://?run={word}", *original(self)[1:])
    try:
        yield
    finally:
        Executor._distributed_args = original
