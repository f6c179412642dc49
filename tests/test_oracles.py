"""Every recorded number of the peers against spmdrl's functions, through the table in oracle_map.py."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from tests.oracle_map import LEFT_OUT, ORACLE_MAP

SHARED = Path(os.environ.get("SPMDRL_SHARED", Path(__file__).parents[1] / "../shared"))
ORACLES = SHARED / "oracles" / "oracle_public.json"

# Computed by the peer in float32 whatever the dtype of the inputs.
FLOAT32_OPS = ("approx_kl_k", "token_rewards", "advantages_", "advantage_whitening", "group_norm_vectorized_verl")
FLOAT32_OPS += ("overlong_penalty", "stop_properly_penalty")
MASKS = ("action_mask", "mask", "loss_mask")


def load_cases() -> dict[str, list[dict]]:
    by_op: dict[str, list[dict]] = {}
    for case in json.loads(ORACLES.read_text())["cases"] if ORACLES.exists() else []:
        by_op.setdefault(case["op"], []).append(case)
    return by_op


CASES = load_cases()
needs_oracles = pytest.mark.skipif(not CASES, reason=f"no recorded cases at {ORACLES}")


def tolerance(case: dict) -> tuple[float, float]:
    is_float32 = case["params"].get("dtype") == "float32" or case["op"].startswith(FLOAT32_OPS)
    return (1e-4, 2e-5) if is_float32 else (1e-6, 1e-7)


def to_tensor(values) -> torch.Tensor:
    def number(v):
        return [number(i) for i in v] if isinstance(v, list) else float(v)

    return torch.tensor(number(values), dtype=torch.float64)


def overflows(case: dict, name: str) -> bool:
    """The peer's naive log-exp loss is infinite where the true value is not; nothing to compare with."""
    return case["op"] == "rm_loss_logexp" and not to_tensor(case["outputs"][name]).isfinite().all()


def difference(case: dict, name: str, got: dict) -> str | None:
    """What is wrong with one output, or None. Compared where the mask is 1, if the output has its shape."""
    expected, actual = to_tensor(case["outputs"][name]), to_tensor(got[name])
    if expected.shape != actual.shape:
        return f"{case['id']} {name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    mask = next((to_tensor(case["inputs"][m]).bool() for m in MASKS if m in case["inputs"]), None)
    if mask is not None and mask.shape == expected.shape:
        expected, actual = expected[mask], actual[mask]
    rtol, atol = tolerance(case)
    is_close = torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=False)
    if is_close.all():
        return None
    worst = (actual - expected)[~is_close].abs().max() if is_close.dim() else (actual - expected).abs()
    return f"{case['id']} {name}: off by {float(worst):.3g}"


@needs_oracles
@pytest.mark.parametrize("op", [op for op in CASES if op not in LEFT_OUT])
def test_matches_every_recorded_case(op):
    wrong = []
    for case in CASES[op]:
        got = ORACLE_MAP[op](case["params"], case["inputs"])
        names = [name for name in case["outputs"] if not overflows(case, name)]
        wrong += [message for name in names if (message := difference(case, name, got))]
    assert not wrong, "\n".join(wrong)


@needs_oracles
def test_every_recorded_op_is_matched_or_left_out_with_a_reason():
    assert set(CASES) == set(ORACLE_MAP) | set(LEFT_OUT)
    assert not set(ORACLE_MAP) & set(LEFT_OUT)
    assert all(LEFT_OUT.values())


def test_the_comparison_sees_a_wrong_number_and_ignores_padding():
    """A check that cannot fail proves nothing: one unit of error is seen on the mask and not off it."""
    case = {
        "id": "x",
        "op": "gae",
        "params": {"dtype": "float64"},
        "inputs": {"action_mask": [[1, 0]]},
        "outputs": {"returns": [[1.0, 5.0]]},
    }
    assert difference(case, "returns", {"returns": [[1.0, 0.0]]}) is None
    assert "off by 1" in str(difference(case, "returns", {"returns": [[2.0, 5.0]]}))
    assert "off by nan" in str(difference(case, "returns", {"returns": [[math.nan, 5.0]]}))
