"""Seconds of one GRPO step, here and in TRL's GRPOTrainer: same model, tokens, ranks and threads, one after the other.

    python bench/step_time.py --model runs/models/SmolLM2-135M-Instruct

A step is 8 prompts x 8 samples x 128 tokens with a reference model: generate, score, one optimizer step. The first
step of each is left out, the median of the others counts. TRL (pip install --no-deps trl) samples with Hugging Face
generate, since its vLLM mode does not run on vLLM's CPU build. Prints a JSON object and appends it to --out.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import MODEL, check_model, conditions, metrics, report, run, torchrun

PROMPTS, SAMPLES, TOKENS = 8, 8, 128


def write_prompts(path: Path, steps: int) -> None:
    rows = [
        {"input": f"Tell me a story about {i} cats and {i + 3} dogs in a small town.", "label": "1"}
        for i in range(PROMPTS * steps)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(args: argparse.Namespace, folder: Path) -> dict:
    """Median step and its phases from our metrics.jsonl."""
    reward = folder / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return [len(set(q)) / 100 for q in queries]\n")
    flags = f"""
        --pretrain {args.model} --prompt_data {folder / "prompts.jsonl"} --label_key label --apply_chat_template
        --reward_func {reward}:reward_func --advantage_estimator group_norm --use_kl_loss --kl_estimator k3
        --rollout_batch_size {PROMPTS} --n_samples_per_prompt {SAMPLES} --train_batch_size {PROMPTS * SAMPLES}
        --generate_max_len {TOKENS} --generate_min_len {TOKENS} --prompt_max_len 128
        --micro_train_batch_size {args.micro} --micro_rollout_batch_size {args.micro}
        --engine {args.engine} --enforce_eager --enable_prefix_caching --vllm_kv_cache_gb 1
        --zero_stage {args.zero_stage} --save_path {folder / "out"}
    """.split()
    run(torchrun(args.ranks, "cli/train_ppo.py", *flags), args.threads)
    rows = metrics(folder / "out")[1:]
    assert all(row["rollout/num_tokens"] == PROMPTS * SAMPLES * TOKENS for row in rows), "not the promised tokens"
    names = [name for name in rows[0] if name.startswith("time/")]
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in names}


def trl(args: argparse.Namespace, folder: Path) -> dict:
    worker = [str(Path(__file__)), "--worker", str(folder), "--model", str(args.model), "--micro", str(args.micro)]
    run(torchrun(args.ranks, *worker, "--ranks", str(args.ranks), "--steps", str(args.steps)), args.threads)
    seconds = json.loads((folder / "trl.json").read_text())[1:]
    return {"time/step_s": round(statistics.median(seconds), 2)}


def trl_worker(args: argparse.Namespace) -> None:
    """Runs on each of TRL's ranks; rank 0 writes the seconds of every step."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder, seconds = Path(args.worker), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *unused, **also_unused):
            self.start = time.perf_counter()

        def on_step_end(self, *unused, **also_unused):
            seconds.append(time.perf_counter() - self.start)

    rows = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["input"]}]})
    bf16 = torch.cpu._is_avx512_bf16_supported() if not torch.cuda.is_available() else True
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=PROMPTS * SAMPLES // args.micro // args.ranks,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        beta=0.01,
        learning_rate=1e-6,
        max_steps=args.steps,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=lambda completions, **unused: [len(set(c[0]["content"])) / 100 for c in completions],
        args=config,
        train_dataset=rows,
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        (folder / "trl.json").write_text(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=4, help="steps of each, the first left out (4)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="per rank")
    parser.add_argument("--micro", type=int, default=8, help="samples of one forward (8)")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--zero_stage", default="2")
    parser.add_argument("--only", choices=["spmdrl", "trl"])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/step_time.jsonl"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return trl_worker(args)
    check_model(args.model)
    result = conditions(args, "model", "ranks", "threads", "micro", "engine", "zero_stage")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", args.steps)
        if args.only != "trl":
            result["spmdrl"] = ours(args, folder)
        if args.only != "spmdrl":
            if importlib.util.find_spec("trl") is None:
                sys.exit("TRL is not installed: pip install --no-deps trl, or --only spmdrl")
            result["trl"] = trl(args, folder)
    if args.only is None:
        result["trl_over_spmdrl"] = round(result["trl"]["time/step_s"] / result["spmdrl"]["time/step_s"], 2)
    report(result, args.out)


if __name__ == "__main__":
    main()
