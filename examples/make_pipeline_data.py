"""Small sums for examples/pipeline.sh: answers to imitate, pairs of answers, and questions.

    python examples/make_pipeline_data.py OUT_DIR

Writes sft, pairs and prompts, each with train.jsonl and test.jsonl; no question of a test file is in a train file. The
answers to imitate are of four kinds, each as frequent as the others. In the pairs one kind, the sum in a sentence, is
preferred to the other three and to itself with a wrong number. The same seed writes the same files.
"""

import argparse
import json
import random
from pathlib import Path

NUM_TEST = 48  # questions


def questions(largest: int) -> list[tuple[str, int]]:
    """Every sum and difference of numbers up to `largest`, with its result."""
    numbers = range(largest + 1)
    sums = [(f"{a} + {b}", a + b) for a in numbers for b in numbers if a + b <= largest]
    return sums + [(f"{a} - {b}", a - b) for a in numbers for b in numbers if b <= a]


def answers(sum_: str, result: int) -> list[str]:
    """The preferred one first."""
    return [f"{sum_} is {result}.", f"The answer is {result}.", f"{result}", f"Maybe {result}?"]


def rejected(rng: random.Random, sum_: str, result: int) -> str:
    wrong = rng.choice([n for n in range(max(result - 4, 0), result + 5) if n != result])
    return rng.choice([*answers(sum_, result)[1:], answers(sum_, wrong)[0]])


def rows_of(rng: random.Random, asked: list[tuple[str, int]]) -> dict[str, list[dict]]:
    texts = [(f"What is {sum_}?", sum_, result) for sum_, result in asked]
    return {
        "sft": [{"prompt": prompt, "answer": rng.choice(answers(sum_, result))} for prompt, sum_, result in texts],
        "pairs": [
            {"prompt": prompt, "chosen": answers(sum_, result)[0], "rejected": rejected(rng, sum_, result)}
            for prompt, sum_, result in texts
        ],
        "prompts": [{"input": prompt, "label": str(result)} for prompt, _, result in texts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--largest", type=int, default=20, help="largest number (20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    asked = questions(args.largest)
    rng.shuffle(asked)
    for split, part in (("test", asked[:NUM_TEST]), ("train", asked[NUM_TEST:])):
        for name, rows in rows_of(rng, part).items():
            path = args.out / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.out}: {len(asked) - NUM_TEST} questions to train on, {NUM_TEST} held out")


if __name__ == "__main__":
    main()
