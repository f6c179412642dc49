"""Reward model, SFT or DPO, here and in TRL: same model, pairs, epochs and learning rate, one after the other.

    python bench/supervised.py rm --model runs/models/SmolLM2-135M-Instruct

Trains on the first --train pairs of the data and judges on the last --held_out ones; prompts of held-out pairs are in
no training pair. Both sides save their weights in fp32 and are judged by the same few lines of plain transformers,
for SFT and DPO the untrained model too. Seconds are those of training, without loading and judging; memory is the most
that all processes hold together. Prints a JSON object and appends it to --out.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from common import MODEL, ROOT, check_model, conditions, metrics, report, run, torchrun

PROGRAMS = ("rm", "sft", "dpo")
BATCH, RATE = 16, {"rm": 2e-5, "sft": 2e-5, "dpo": 5e-6}


# ---- data -----------------------------------------------------------------------------------------------------------
def split(path: Path, num_train: int, num_held_out: int, folder: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = rows[-num_held_out:]
    kept_apart = {row["prompt"] for row in last}
    train = [row for row in rows if row["prompt"] not in kept_apart][:num_train]
    for name, part in (("train", train), ("held_out", last)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


# ---- the two sides --------------------------------------------------------------------------------------------------
def ours(args: argparse.Namespace, folder: Path) -> dict:
    keys = "--input_key prompt --output_key chosen" if args.program == "sft" else "--prompt_key prompt"
    flags = f"""
        --pretrain {args.model} --dataset {folder / "train.jsonl"} {keys} --apply_chat_template
        --max_len {args.max_len} --seed {args.seed}
        --train_batch_size {BATCH} --micro_train_batch_size {args.micro} --max_epochs 1 --learning_rate {args.rate}
        --lr_scheduler linear --lr_warmup_ratio 0 --adam_betas 0.9 0.999 --zero_stage {args.zero_stage}
        --save_dtype fp32 --save_path {folder / "spmdrl"} --ckpt_path {folder / "checkpoints"}
    """.split()
    flags += [{"auto": "", "fp32": "--no_bf16", "bf16": "--bf16"}[args.dtype]] if args.dtype != "auto" else []
    script = [f"cli/train_{args.program}.py", *flags]
    command = torchrun(args.ranks, *script) if args.ranks > 1 else [sys.executable, *script]
    memory = run(command, args.threads // args.ranks)
    rows = metrics(folder / "spmdrl")
    phases = ("time/ref_log_probs_s", "time/train_s")
    seconds = sum(row.get(phase, 0.0) for row in rows for phase in phases)
    return {"train_s": round(seconds, 1), "peak_gb": memory, "steps": len(rows)}


def trl(args: argparse.Namespace, folder: Path) -> dict:
    words = [f"--{name}={getattr(args, name)}" for name in ("model", "micro", "rate", "max_len", "dtype", "seed")]
    worker = [str(Path(__file__)), args.program, "--worker", str(folder), *words]
    memory = run([sys.executable, *worker], args.threads)
    return json.loads((folder / "trl.json").read_text()) | {"peak_gb": memory}


# ---- TRL, in a process of its own -----------------------------------------------------------------------------------
def trl_worker(args: argparse.Namespace) -> None:
    import torch
    import trl
    from datasets import load_dataset

    folder = Path(args.worker)
    program = {"rm": "Reward", "sft": "SFT", "dpo": "DPO"}[args.program]
    bf16 = wants_bf16(args.dtype)
    options: dict = {"model_init_kwargs": {"dtype": "float32"}} if args.program != "rm" else {}
    if args.program == "dpo":
        options |= {"beta": 0.1, "precompute_ref_log_probs": True, "precompute_ref_batch_size": args.micro}
    config = getattr(trl, f"{program}Config")(
        output_dir=str(folder / "trl_out"),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=BATCH // args.micro,
        num_train_epochs=1,
        learning_rate=args.rate,
        lr_scheduler_type="linear",
        max_length=args.max_len,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=args.seed,
        **options,
    )
    rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    rows = rows.map(lambda row: as_messages(row, args.program), remove_columns=rows.column_names)
    trainer = getattr(trl, f"{program}Trainer")(model=args.model, args=config, train_dataset=rows)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.save_model(str(folder / "trl"))
    steps = trainer.state.global_step
    (folder / "trl.json").write_text(json.dumps({"train_s": round(seconds, 1), "steps": steps}))


def as_messages(row: dict, program: str) -> dict:
    answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    prompt = {"prompt": [{"role": "user", "content": row["prompt"]}]}
    return prompt | ({"completion": answers["chosen"]} if program == "sft" else answers)


def wants_bf16(dtype: str) -> bool:
    import torch

    if dtype != "auto":
        return dtype == "bf16"
    if torch.cuda.is_available():
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# ---- judging --------------------------------------------------------------------------------------------------------
def judged(program: str, model: str | Path, base: str, folder: Path) -> dict[str, float]:
    """What a saved model is worth on the held-out pairs, in fp32: accuracy, or the loss of a chosen token."""
    if program == "rm":
        score, pairs = scorer(model), held_out(folder)
        scores = [[score(conversation_ids(base, *text)) for text in pair] for pair in pairs]
        right = [chosen > rejected for chosen, rejected in scores]
        return {"accuracy": round(sum(right) / len(right), 4)}
    chosen = log_probs(model, base, folder, 0)
    loss = round(-sum(total for total, _ in chosen) / sum(length for _, length in chosen), 4)
    if program == "sft":
        return {"loss": loss}
    sides = zip(
        chosen, log_probs(model, base, folder, 1), *(log_probs(base, base, folder, i) for i in (0, 1)), strict=True
    )
    gains = [(c[0] - ref_c[0]) - (r[0] - ref_r[0]) for c, r, ref_c, ref_r in sides]
    return {"accuracy": round(sum(gain > 0 for gain in gains) / len(gains), 4), "loss": loss}


def held_out(folder: Path) -> list[list[tuple[str, str]]]:
    """Chosen and rejected of each pair, each a prompt and its response."""
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    return [[(row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]


def conversation_ids(base: str, prompt: str, answer: str) -> list[int]:
    """Up to the EOS."""
    talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    text = tokenizer_of(base).apply_chat_template(talk, tokenize=False).rstrip()
    return tokenizer_of(base)(text, add_special_tokens=False)["input_ids"]


@cache
def tokenizer_of(base: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


def scorer(model: str | Path):
    """ids -> the score at the last of them."""
    import torch
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(ids: list[int]) -> float:
        hidden = classifier.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        return float(classifier.score(hidden[0, -1]))

    return score


@cache
def log_probs(model: str | Path, base: str, folder: Path, side: int) -> list[tuple[float, int]]:
    """Of each response of a side of the pairs: the sum of its log-probs and its number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, found = tokenizer_of(base), []
    for pair in held_out(folder):
        ids = torch.tensor([conversation_ids(base, *pair[side])])
        talk = [{"role": "user", "content": pair[side][0]}]
        start = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        first = len(tokenizer(start, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = lm(input_ids=ids, logits_to_keep=ids.shape[1] - first + 1).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(-1, ids[0, first:, None])
        found.append((float(picked.sum()), len(picked)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k_preferences.jsonl")
    parser.add_argument("--train", type=int, default=600, help="training pairs (600)")
    parser.add_argument("--held_out", type=int, default=400, help="held-out pairs (400)")
    parser.add_argument("--rate", type=float, help="peak learning rate (2e-5, DPO 5e-6)")
    parser.add_argument("--micro", type=int, default=8, help="pairs or rows of one forward (8)")
    parser.add_argument("--max_len", type=int, default=512)
    parser.add_argument("--dtype", choices=["auto", "fp32", "bf16"], default="auto", help="of the compute")
    parser.add_argument("--zero_stage", default="2")
    parser.add_argument("--ranks", type=int, default=1, help="of ours, which share the threads (1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", choices=["spmdrl", "trl"])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/supervised.jsonl"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rate = args.rate or RATE[args.program]
    if args.worker:
        return trl_worker(args)
    check_model(args.model)
    if args.only != "spmdrl" and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install --no-deps trl, or --only spmdrl")
    named = ("program", "model", "train", "held_out", "rate", "micro", "max_len", "dtype", "ranks", "threads")
    result = conditions(args, *named)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split(args.data, args.train, args.held_out, folder)
        if args.program != "rm":  # whose head would be a random one
            result["before"] = judged(args.program, args.model, args.model, folder)
        for side, train in (("spmdrl", ours), ("trl", trl)):
            if args.only in (None, side):
                result[side] = train(args, folder)
                print(f"{side}: {result[side]}, now judged", file=sys.stderr, flush=True)
                result[side] |= judged(args.program, folder / side, args.model, folder)
    if args.only is None:
        result["trl_over_spmdrl"] = round(result["trl"]["train_s"] / result["spmdrl"]["train_s"], 2)
    report(result, args.out)


if __name__ == "__main__":
    main()
