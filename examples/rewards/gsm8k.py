r"""1 where the response's final answer is the label's number, as in GSM8K; else 0.

The final answer is the number behind `####`, or in `\boxed{}`, or the last one: "$1,200.00" equals 1200.
`--label_key answer` may hold GSM8K's whole solution or the number alone.
"""

from spmdrl.rewards.answers import final_number, required_number, responses


def reward_func(queries, prompts, labels, **columns):
    answers = [final_number(text) for text in responses(queries, prompts)]
    right = [answer == required_number(label) for answer, label in zip(answers, labels, strict=True)]
    return {"rewards": right, "extra_logs": {"has_answer": [answer is not None for answer in answers]}}
