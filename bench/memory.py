"""Memory of four-role PPO (actor, critic, reference, reward model): whole models, LoRA, and one shared backbone.

    python bench/memory.py --model runs/models/SmolLM2-135M-Instruct

Trains a small reward adapter, merges it for the runs that need a whole reward model, and takes two steps in each mode.
`file_gb` is the size of the weights on disk. Prints a JSON object and appends it to --out.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from common import MODEL, check_model, conditions, metrics, report, run, torchrun

MODES = {"whole": "", "lora": "--lora_rank 8", "share_backbone": "--lora_rank 8 --share_backbone"}


def write_rows(folder: Path) -> None:
    words = ["cats", "dogs", "birds", "fish", "boats", "trees", "songs", "books"]
    pairs = [{"prompt": f"What are {w}?", "chosen": f"{w.title()} are fine.", "rejected": "No idea."} for w in words]
    prompts = [{"input": f"Tell me a story about {w} and {other}."} for w in words for other in words[:2]]
    for name, rows in (("pairs", pairs), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_reward_models(args: argparse.Namespace, folder: Path) -> None:
    """An adapter in folder/adapter, and the same merged in folder/merged."""
    flags = f"""
        --pretrain {args.model} --dataset {folder / "pairs.jsonl"} --prompt_key prompt --apply_chat_template
        --max_len 64
        --train_batch_size 8 --micro_train_batch_size 4 --lora_rank 8 --save_path {folder / "adapter"}
        --ckpt_path {folder / "checkpoints"}
    """.split()
    run(torchrun(1, "cli/train_rm.py", *flags), args.threads)
    merge = ["cli/merge_lora.py", "--is_rm", "--lora_path", str(folder / "adapter")]
    run([sys.executable, *merge, "--output_path", str(folder / "merged")], args.threads)


def measure(mode: str, args: argparse.Namespace, folder: Path) -> dict:
    reward_model = folder / ("adapter" if mode == "share_backbone" else "merged")
    flags = f"""
        --pretrain {args.model} --reward_pretrain {reward_model} --prompt_data {folder / "prompts.jsonl"}
        --apply_chat_template --prompt_max_len 64 --generate_max_len 64 --engine hf --advantage_estimator gae
        --rollout_batch_size 8 --n_samples_per_prompt 1 --train_batch_size 8 --micro_train_batch_size 2
        --micro_rollout_batch_size 2 --zero_stage {args.zero_stage} {MODES[mode]}
        --save_path {folder / mode} --ckpt_path {folder / "checkpoints"}
    """.split()
    peak = run(torchrun(args.ranks, "cli/train_ppo.py", *flags), args.threads)
    return {"peak_gb": peak, "step_s": round(metrics(folder / mode)[-1]["time/step_s"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="per rank (1)")
    parser.add_argument("--zero_stage", default="2")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/memory.jsonl"))
    args = parser.parse_args()
    check_model(args.model)
    weights = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    result = conditions(args, "model", "ranks", "threads", "zero_stage") | {"file_gb": round(weights / 1e9, 2)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        train_reward_models(args, folder)
        result |= {mode: measure(mode, args, folder) for mode in MODES}
    report(result, args.out)


if __name__ == "__main__":
    main()
