"""Forward and backward of the policy over responses to one prompt: each with its prompt, and the prompt once for all.

    python bench/shared_prompts.py --model runs/models/SmolLM2-135M-Instruct

One thread, random tokens, the median of --repeats each, alternating. Prints a JSON object and appends it to --out.
"""

import argparse
import statistics
import time
from pathlib import Path

from common import MODEL, check_model, conditions, report

# Prompts, tokens of a prompt, responses to each, tokens of a response.
SHAPES = {
    "arithmetic, as in make demo": (2, 18, 8, 5),
    "short chat": (2, 40, 4, 10),
    "word problems": (1, 100, 4, 150),
    "short prompt, long responses": (1, 40, 8, 128),
    "long prompt, short responses": (1, 400, 4, 60),
}


def make_batch(num_prompts: int, prompt: int, num_responses: int, response: int):
    import torch

    rows = []
    for _ in range(num_prompts):
        start = torch.randint(10, 40_000, (prompt,))
        rows += [torch.cat([start, torch.randint(10, 40_000, (response,))]) for _ in range(num_responses)]
    action_mask = torch.zeros(len(rows), prompt + response - 1, dtype=torch.bool)
    action_mask[:, prompt - 1 :] = True
    return torch.stack(rows), action_mask


def seconds(actor, batch) -> float:
    start = time.perf_counter()
    log_probs, _ = actor(*batch)
    log_probs.sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/shared_prompts.jsonl"))
    args = parser.parse_args()
    check_model(args.model)
    import torch
    from transformers import AutoModelForCausalLM

    from spmdrl.models.actor import Actor
    from spmdrl.models.packing import padded, shared

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    result = conditions(args, "model", "repeats")
    for name, shape in SHAPES.items():
        batch, times = make_batch(*shape), {padded: [], shared: []}
        for _ in range(args.repeats):
            for layout, taken in times.items():
                taken.append(seconds(Actor(model, layout=layout), batch))
        each, once = (statistics.median(taken) for taken in times.values())
        result[name] = {"each_s": round(each, 2), "once_s": round(once, 2), "each_over_once": round(each / once, 2)}
    report(result, args.out)


if __name__ == "__main__":
    main()
