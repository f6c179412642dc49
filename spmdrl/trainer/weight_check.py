"""--verify_weight_sync: engine and trainer must agree on the log-probs of a probe, or the engine has other weights."""

from collections.abc import Sequence

import torch

from spmdrl.distributed import comm
from spmdrl.experience import Sample

# Largest and mean |log-prob of the engine - log-prob of the trainer| that the dtype explains. Measured with a model of
# 135M parameters: fp32 5e-5 and 5e-6, bf16 0.3 and 0.045.
TOLERANCE = {torch.float32: (2e-3, 2e-4), torch.bfloat16: (1.0, 0.15)}


def check_weights(samples: Sequence[Sample], dtype: torch.dtype) -> float:
    """The largest gap on any rank, from this rank's scored probe `samples`. A collective.

    Raises RuntimeError, with the numbers of this rank's worst token, where the largest gap is more than `dtype`
    explains or, as when one small layer is stale, the mean is.
    """
    gaps = torch.cat([_gaps(s) for s in samples]) if samples else torch.zeros(0)
    total, count = comm.all_reduce_sum(torch.stack([gaps.sum(), torch.tensor(float(len(gaps)))])).tolist()
    mean, worst = total / max(count, 1.0), comm.all_reduce_max(float(gaps.max()) if len(gaps) else 0.0)
    most, most_mean = TOLERANCE[dtype]
    if worst > most or mean > most_mean:
        raise RuntimeError(
            f"--verify_weight_sync: engine and trainer disagree by {worst:.6f} on the worst token and {mean:.6f} on "
            f"the mean of all ranks; {dtype} explains {most} and {most_mean}; {_worst_token(samples)}"
        )
    return worst


def _gaps(sample: Sample) -> torch.Tensor:
    """(number of sampled tokens,) |engine - trainer|, infinite where either is NaN."""
    assert sample.log_probs is not None, "a probe that the trainer did not score"
    gaps = (sample.log_probs - sample.rollout_log_probs).abs()[sample.action_mask]
    return gaps.double().nan_to_num(nan=float("inf"))


def _worst_token(samples: Sequence[Sample]) -> str:
    if not samples:
        return "this rank had no probe"
    sample = max(samples, key=lambda s: float(_gaps(s).max()) if s.response_length else -1.0)
    positions = sample.action_mask.nonzero()[:, 0]
    at = int(positions[int(_gaps(sample).argmax())])
    assert sample.log_probs is not None
    return (
        f"row {sample.row}, token {int(sample.sequence[at + 1])} at position {at + 1}: engine "
        f"{float(sample.rollout_log_probs[at]):.6f}, trainer {float(sample.log_probs[at]):.6f}"
    )
