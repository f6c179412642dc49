"""The demo's reward, 0 to 1: half for the right number coming last, half for the response ending with it.

"7 + 5 = 12." 1      "It is 12, which is a dozen eggs" 0.5      "12 - 5 = 7" 0
"""

import re

from spmdrl.rewards.answers import numbers_in, required_number, responses

ENDS_IN_NUMBER = re.compile(r"\d[^\w\d]*\Z")


def score(text: str, answer) -> float:
    found = numbers_in(text)
    if not found or found[-1] != answer:
        return 0.0
    return 1.0 if ENDS_IN_NUMBER.search(text) else 0.5


def reward_func(queries, prompts, labels, **columns):
    texts = responses(queries, prompts)
    scores = [score(text, required_number(label)) for text, label in zip(texts, labels, strict=True)]
    return {"rewards": scores, "extra_logs": {"right": [s > 0 for s in scores]}}
