"""Reward model, SFT or DPO, here and in TRL: same model, pairs, epochs and learning rate, one after the other.

    python bench/supervised.py rm --model runs/models/SmolLM2-135M-Instruct

Trains on the first --train pairs of the data and judges on the last --held_out ones; prompts of held-out pairs are in
no training pair. Both sides' saved models are judged by the same few lines of plain transformers, before training too.
Seconds are those of training, without loading and judging; memory is the most that all processes hold together.
Prints a JSON object and appends it to --out.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("rm", "sft", "dpo")
BATCH, RATE = 16, {"rm": 2e-5, "sft": 2e-5, "dpo": 5e-6}


# ---- data -----------------------------------------------------------------------------------------------------------
def split(path: Path, num_train: int, num_held_out: int, folder: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    held_out = rows[-num_held_out:]
    kept_apart = {row["prompt"] for row in held_out}
    train = [row for row in rows if row["prompt"] not in kept_apart][:num_train]
    for name, part in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


# ---- running --------------------------------------------------------------------------------------------------------
def run(command: list[str], threads: int) -> float:
    """Run to the end; the most memory that its processes held together, in GB."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    peak, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], resident_gb(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nfailed:\n{out[-4000:]}")
    return round(peak[0], 2)


def resident_gb(session: int) -> float:
    """Resident memory of all processes of a session; what they share is counted once for each."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total / 1e9


def ours(args: argparse.Namespace, folder: Path) -> dict:
    keys = "--input_key prompt --output_key chosen" if args.program == "sft" else "--prompt_key prompt"
    flags = f"""
        --pretrain {args.model} --dataset {folder / "train.jsonl"} {keys} --apply_chat_template
        --max_len {args.max_len} --seed {args.seed}
        --train_batch_size {BATCH} --micro_train_batch_size {args.micro} --max_epochs 1 --learning_rate {args.rate}
        --lr_scheduler linear --lr_warmup_ratio 0 --adam_betas 0.9 0.999 --zero_stage {args.zero_stage}
        --save_path {folder / "spmdrl"} --ckpt_path {folder / "checkpoints"}
    """.split()
    flags += [{"auto": "", "fp32": "--no_bf16", "bf16": "--bf16"}[args.dtype]] if args.dtype != "auto" else []
    script = [f"cli/train_{args.program}.py", *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    memory = run([sys.executable, *(launcher if args.ranks > 1 else []), *script], args.threads // args.ranks)
    rows = [json.loads(line) for line in (folder / "spmdrl" / "metrics.jsonl").read_text().splitlines()]
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
    import torch

    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    with torch.no_grad():
        if program == "rm":
            scores = [[score(text) for text in pair] for score in [scorer(model)] for pair in texts_of(base, rows)]
            right = [chosen > rejected for chosen, rejected in scores]
            return {"accuracy": round(sum(right) / len(right), 4)}
        log_probs = [[of(*text) for text in pair] for of in [scored_response(model, base)] for pair in parts_of(rows)]
        loss = -sum(chosen[0] for chosen, _ in log_probs) / sum(chosen[1] for chosen, _ in log_probs)
        if program == "sft":
            return {"loss": round(loss, 4)}
        reference = [[of(*text) for text in pair] for of in [scored_response(base, base)] for pair in parts_of(rows)]
        gains = [(c[0] - rc[0]) - (r[0] - rr[0]) for (c, r), (rc, rr) in zip(log_probs, reference, strict=True)]
        return {"accuracy": round(sum(gain > 0 for gain in gains) / len(gains), 4), "loss": round(loss, 4)}


def parts_of(rows: list[dict]) -> list[list[tuple[str, str]]]:
    return [[(row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]


def texts_of(base: str, rows: list[dict]) -> list[list[list[int]]]:
    """Ids of both conversations of each pair, up to the EOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)

    def ids(prompt: str, answer: str) -> list[int]:
        talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(talk, tokenize=False).rstrip()
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [[ids(*part) for part in pair] for pair in parts_of(rows)]


def scorer(model: str | Path):
    """ids -> the score at the last of them."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)  # of a head that the checkpoint lacks
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).eval()

    def score(ids: list[int]) -> float:
        hidden = classifier.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        return float(classifier.score(hidden[0, -1]))

    return score


def scored_response(model: str | Path, base: str):
    """(prompt, response) -> (sum of the response's log-probs, its number of tokens)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def of(prompt: str, answer: str) -> tuple[float, int]:
        talk = [{"role": "user", "content": prompt}]
        start = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        first = len(tokenizer(start, add_special_tokens=False)["input_ids"])
        text = tokenizer.apply_chat_template([*talk, {"role": "assistant", "content": answer}], tokenize=False)
        ids = torch.tensor([tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"]])
        log_probs = lm(input_ids=ids).logits[0, first - 1 : -1].log_softmax(-1)
        picked = log_probs.gather(-1, ids[0, first:, None])
        return float(picked.sum()), len(picked)

    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
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
    if not Path(args.model).is_dir():
        sys.exit(f"--model {args.model} is no directory: python examples/prepare_smollm2.py {args.model}")
    if args.only != "spmdrl" and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install --no-deps trl, or --only spmdrl")
    named = ("program", "model", "train", "held_out", "rate", "micro", "max_len", "dtype", "ranks", "threads")
    result: dict = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    result |= {name: str(getattr(args, name)) for name in named}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split(args.data, args.train, args.held_out, folder)
        result["before"] = judged(args.program, args.model, args.model, folder)
        for side, train in (("spmdrl", ours), ("trl", trl)):
            if args.only in (None, side):
                result[side] = train(args, folder)
                result[side] |= judged(args.program, folder / side, args.model, folder)
    if args.only is None:
        result["trl_over_spmdrl"] = round(result["trl"]["train_s"] / result["spmdrl"]["train_s"], 2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
