r"""1 where math-verify finds the response's answer equal to the label, such as \boxed{\frac{1}{2}} and 0.5; else 0.

Needs `pip install math-verify`. A response that cannot be decided within ten seconds counts as not equal, and is
counted in the metric rollout/math_verify_timeout. A label without a mathematical expression is an error.
"""

from spmdrl.rewards.answers import responses
from spmdrl.rewards.maths import MathVerifier

verifier = MathVerifier()


def reward_func(queries, prompts, labels, **columns):
    texts = responses(queries, prompts)
    equal = [verifier.equal(label, text) for label, text in zip(labels, texts, strict=True)]
    return {
        "rewards": [e is True for e in equal],
        "extra_logs": {"math_verify_timeout": [e is None for e in equal]},
    }
