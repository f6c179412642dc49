"""The demo's reward: 1 where the response is the right number and nothing else, otherwise 0.

" 12" 1      "12.\\n" 1      "The answer is 12" 0      " 12 or 13" 0
"""

import re

from spmdrl.rewards.answers import required_number, responses

NUMBER_ALONE = re.compile(r"\s*(-?\d+)\s*\.?\s*")


def score(text: str, answer) -> float:
    match = NUMBER_ALONE.fullmatch(text)
    return float(match is not None and int(match[1]) == answer)


def reward_func(queries, prompts, labels, **columns):
    texts = responses(queries, prompts)
    scores = [score(text, required_number(label)) for text, label in zip(texts, labels, strict=True)]
    return {"rewards": scores, "extra_logs": {"number_alone": [bool(NUMBER_ALONE.fullmatch(t)) for t in texts]}}
