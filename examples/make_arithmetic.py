"""Sums and differences up to 10 as prompts with their answers, for the demo.

    python examples/make_arithmetic.py OUT.jsonl --num 512 --seed 0

One row a question: {"input": "Question: 4 + 5 = ?\\nAnswer:", "label": "9", "kind": "sum"}. Numbers added are at most
--largest / 2 and a minuend at most --largest, and nothing is negative. The same seed writes the same file.
"""

import argparse
import json
import random
from pathlib import Path

WORDING = "Question: {left} {sign} {right} = ?\nAnswer:"


def make_row(rng: random.Random, largest: int) -> dict[str, str]:
    if rng.random() < 0.5:
        left, right = rng.randint(0, largest // 2), rng.randint(0, largest // 2)
        return {"input": WORDING.format(left=left, sign="+", right=right), "label": str(left + right), "kind": "sum"}
    left = rng.randint(0, largest)
    right = rng.randint(0, left)
    label = str(left - right)
    return {"input": WORDING.format(left=left, sign="-", right=right), "label": label, "kind": "difference"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=512, help="number of rows (512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=10, help="largest result (10)")
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
