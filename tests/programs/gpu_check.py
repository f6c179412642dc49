"""One check of tests/test_gpu.py on every rank: `torchrun ... tests/programs/gpu_check.py NAME FOLDER`.

FOLDER has a model in `model`. An assertion that fails ends the program with its traceback.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmdrl.config import AlgoConfig, DeepSpeedConfig, LoraConfig, ModelConfig, OptimConfig, RolloutConfig
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import Strategy
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.models.actor import Actor
from spmdrl.models.loading import CheckpointWeights, load_causal_lm
from spmdrl.models.packing import packed, padded
from spmdrl.trainer.policy_update import PolicyUpdate
from spmdrl.trainer.scoring import log_probs_of, score_samples
from spmdrl.trainer.weight_check import TOLERANCE
from tests.distributed import test_offload as offload
from tests.distributed import test_strategy as steps

BF16 = torch.bfloat16
MIB = 2**20


# ---- training -------------------------------------------------------------------------------------------------------
def zero_stages(path):
    """Two optimizer steps in fp32 under every ZeRO stage, and with Adam on the host, change the weights alike."""
    settings = [*((stage, ()) for stage in range(4)), (2, {"adam_offload": True}), (3, {"adam_offload": True})]
    settings.append((3, {"ref_reward_offload": True}))  # which is not for what is trained
    first = None
    for stage, extra in settings:
        weights, report = steps.train_step(path, stage, 2, range(7), "token-mean", 2, tuple(dict(extra).items()))
        first = first or (weights, report)
        steps.assert_same_weights(weights, first[0], atol=2e-5)
        assert abs(report["policy/grad_norm"] / first[1]["policy/grad_norm"] - 1) < 1e-4, (stage, extra)
    assert steps.moved(path, {name: w.cpu() for name, w in first[0].items()}) > 5e-3


def hand_over(path):
    """States that were in host memory between the steps leave no byte on the device and come back bit for bit."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    for setting in offload.SETTINGS:
        stayed, _ = offload.train(path, setting, False)
        torch.cuda.empty_cache()
        moved, sizes = offload.train(path, setting, True)
        steps.assert_same_weights(moved, stayed, atol=0)
        assert all(left == 0 for _, left in sizes), (setting, sizes)


def frozen_offload(path):
    """A frozen model that rests in host memory, sharded or whole, scores as one that stays on the device."""
    scores = []
    for stage in (0, 3):
        for rests in (False, True):
            config = DeepSpeedConfig(zero_stage=stage, ref_reward_offload=rests)
            strategy = Strategy(config, OptimConfig(), dtype=BF16)
            with strategy.loading(frozen=True):
                model = load_causal_lm(ModelConfig(pretrain=path), dtype=BF16)
            frozen = strategy.frozen(Actor(model))
            weight = next(iter(frozen.parameters()))
            at_rest = getattr(weight, "ds_tensor", weight).device.type
            assert at_rest == ("cpu" if rests else comm.device().type), (stage, rests, at_rest)
            with strategy.on_device(frozen):
                scores.append(torch.cat(score(frozen)))
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], atol=0.1, rtol=0)


def score(model, layout=padded):
    """Log-probs of the fixed samples' tokens, all ranks' the same."""
    samples = steps.fixed_samples()
    for sample in samples:
        sample.log_probs = None
    getattr(model, "module", model).layout = layout
    score_samples(log_probs_of(model), samples, "log_probs", micro_batch_size=4)
    return [s.log_probs for s in samples]


def attention(path):
    """Every kernel, over padded and over packed sequences, gives fp32's log-probs up to bf16's noise."""
    model = load_causal_lm(ModelConfig(pretrain=path, attention="eager"), dtype=torch.float32)
    exact = torch.cat(score(Actor(model).to(comm.device())))
    kernels = ["eager", "sdpa"]
    if importlib.util.find_spec("flash_attn") is not None:
        kernels.append("flash_attention_2")
    for kernel in kernels:
        model = load_causal_lm(ModelConfig(pretrain=path, attention=kernel), dtype=BF16)
        assert model.config._attn_implementation == kernel
        actor = Actor(model).to(comm.device())
        for layout in (padded, packed):
            gap = (torch.cat(score(actor, layout)) - exact).abs()
            assert gap.max() < 0.5 and gap.mean() < 0.05, (kernel, layout.__name__, float(gap.max()))
    comm.say(f"kernels: {kernels}")


def rewards(path):
    """What a reward function leaves on the device comes back to the host."""
    from spmdrl.rewards.function import read_numbers

    given = torch.tensor([1.0, 2.0, 3.0], device=comm.device())
    assert read_numbers(given, ["a", "b", "c"], "a reward").tolist() == [1.0, 2.0, 3.0]


# ---- engine ---------------------------------------------------------------------------------------------------------
def make_engine(path, **options):
    from spmdrl.rollout.vllm_engine import VLLMEngine

    config = RolloutConfig(vllm_enable_sleep=True, vllm_gpu_memory_utilization=0.4, **options)
    weights = CheckpointWeights(ModelConfig(pretrain=path))
    return VLLMEngine(path, config, dtype=BF16, max_len=128, max_samples=64, weights=weights)


def load_into(engine, weights):
    engine.wake_up(["weights"])
    engine.load_weights(weights)
    assert engine.reset_prefix_cache()
    engine.wake_up(["kv_cache"])


def respond(engine):
    from spmdrl.rollout.engine import Request, SamplingOptions

    options = SamplingOptions(temperature=0.0, top_p=1.0, top_k=-1, min_new_tokens=8, max_new_tokens=24, stop=())
    return engine.generate([Request([5 + i, 6, 7, 8 + i], i) for i in range(8)], options)


def assert_trainers_weights(completions, actor):
    """The engine's log-probs are the trainer's, as --verify_weight_sync judges."""
    from spmdrl.experience import make_sample

    samples = [
        make_sample([5 + i, 6, 7, 8 + i], c.token_ids, c.log_probs, finish_reason="length", group_id=i, index=0, row=i)
        for i, c in enumerate(completions)
    ]
    score_samples(log_probs_of(actor), samples, "log_probs", micro_batch_size=4)
    gaps = torch.cat([(s.log_probs - s.rollout_log_probs).abs()[s.action_mask] for s in samples])
    most, most_mean = TOLERANCE[BF16]
    assert gaps.max() < most and gaps.mean() < most_mean, (float(gaps.max()), float(gaps.mean()))


def sleep_cycles(path):
    """Greedy responses are the same after every sleep, wake and load of the same weights, with CUDA graphs; others
    with other weights; and 20 cycles leave the free memory as it is, asleep and awake."""
    engine = make_engine(path)
    model = load_causal_lm(ModelConfig(pretrain=path), dtype=BF16).to(comm.device())
    engine.sleep()
    first, asleep, awake = None, [], []
    for _ in range(20):
        load_into(engine, iter(model.named_parameters()))
        awake.append(torch.cuda.mem_get_info()[0])
        responses = respond(engine)
        first = first or responses
        assert [c.token_ids for c in responses] == [c.token_ids for c in first]
        engine.sleep()
        asleep.append(torch.cuda.mem_get_info()[0])
    assert min(asleep) - max(awake) > 0.2 * torch.cuda.mem_get_info()[1], "sleeping frees no memory"
    for free in (asleep[2:], awake[2:]):
        assert max(free) - min(free) < 64 * MIB, [x // MIB for x in free]
    assert_trainers_weights(first, Actor(model))
    generator = torch.Generator(comm.device()).manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn(param.shape, generator=generator, device=param.device).to(param.dtype)
    load_into(engine, iter(model.named_parameters()))
    others = respond(engine)
    assert [c.token_ids for c in others] != [c.token_ids for c in first]
    assert_trainers_weights(others, Actor(model))


def four_bits(path):
    """LoRA on 4-bit weights: a step moves the adapters only, and the engine samples from the merged weights."""
    from spmdrl.models.lora import add_lora, quantization

    engine = make_engine(path, enforce_eager=True)
    engine.sleep()
    lora = LoraConfig(lora_rank=8, load_in_4bit=True)
    strategy = Strategy(DeepSpeedConfig(zero_stage=2), OptimConfig(lr_warmup_ratio=0.0), dtype=BF16)
    model = load_causal_lm(ModelConfig(pretrain=path), dtype=BF16, **quantization(lora, BF16))
    add_lora(model, lora, seed=1)
    packed_bits = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert packed_bits
    actor = strategy.trainable(Actor(model), learning_rate=1e-2, total_steps=10)
    before = {name: w.clone() for name, w in iter_weights(actor, bucket_mb=1)}
    assert before.keys() == set(CheckpointWeights(ModelConfig(pretrain=path)).names)
    update = PolicyUpdate(strategy, AlgoConfig(), strategy.optim, max_tokens=16, correction="none")
    for _ in range(3):
        update.optimizer_step(actor, steps.fixed_samples(), kl_coef=0.0)
    for name, p in model.named_parameters():
        assert name not in packed_bits or torch.equal(p, packed_bits[name]), name
    after = dict(iter_weights(actor, bucket_mb=1))
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(w.isfinite().all() for w in after.values())
    load_into(engine, iter(after.items()))
    assert_trainers_weights(respond(engine), actor)


CHECKS = {f.__name__: f for f in (zero_stages, hand_over, frozen_offload, rewards, attention, sleep_cycles, four_bits)}

if __name__ == "__main__":
    comm.init()
    CHECKS[sys.argv[1]](str(Path(sys.argv[2], "model")))
    comm.barrier()
    comm.say(f"{sys.argv[1]} holds")
    os._exit(0)  # vLLM's exit handlers wait for groups whose members are gone
