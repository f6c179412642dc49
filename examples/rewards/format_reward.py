"""1 where the response is <think>...</think> and then <answer>...</answer> and nothing else; else 0.

Behind a prompt that already opens <think>, as some chat templates do, the response starts inside it.
"""

import re

from spmdrl.rewards.answers import responses

LAYOUT = re.compile(r"\s*<think>(?P<thought>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def has_format(text: str) -> bool:
    """Each tag once and in order, something in both parts, nothing around them."""
    match = LAYOUT.fullmatch(text)
    if match is None or any(text.count(tag) != 1 for tag in TAGS):
        return False
    return bool(match["thought"].strip() and match["answer"].strip())


def reward_func(queries, prompts, labels, **columns):
    opened = ["<think>" if prompt.rstrip().endswith("<think>") else "" for prompt in prompts]
    return [has_format(start + text) for start, text in zip(opened, responses(queries, prompts), strict=True)]
