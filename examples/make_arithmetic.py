"""Sums and differences up to 20 as prompts with their answers, for the demo.

    python examples/make_arithmetic.py OUT.jsonl --num 512 --seed 0

One row a question: {"input": "What is 7 + 5? Answer with the number only.", "label": "12", "kind": "sum"}. Results are
spread evenly from 0 to --largest, and nothing is negative. The same seed writes the same file.
"""

import argparse
import json
import random
from pathlib import Path

WORDING = "What is {left} {sign} {right}? Answer with the number only."


def make_row(rng: random.Random, largest: int) -> dict[str, str]:
    """A sum with a result, or a difference with a minuend, of at most `largest`."""
    top = rng.randint(0, largest)
    part = rng.randint(0, top)
    if rng.random() < 0.5:
        return {"input": WORDING.format(left=part, sign="+", right=top - part), "label": str(top), "kind": "sum"}
    return {"input": WORDING.format(left=top, sign="-", right=part), "label": str(top - part), "kind": "difference"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=512, help="number of rows (512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=20, help="largest number in a question or an answer (20)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = [make_row(rng, args.largest) for _ in range(args.num)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_name(args.out.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(args.out)
    print(f"{args.out}: {args.num} questions")


if __name__ == "__main__":
    main()
