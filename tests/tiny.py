"""Tiny random checkpoints and byte-level tokenizers, written in a test's own folder.

All tokenizers share one vocabulary of 320 ids (4 special tokens, 256 bytes, 60 merges), so any text can be
encoded and the variants differ only in what they call pad, eos and bos.
"""

import json
from pathlib import Path
from typing import Literal

BOS, EOS, PAD, HEADER = "<|bos|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"
SPECIAL_TOKENS = [
    PAD,
    BOS,
    EOS,
    HEADER,
]  # ids 0, 1, 2, 3; Qwen2Tokenizer would append <|endoftext|> if it were missing
VOCAB_SIZE = 320
MERGED_WORDS = " the|What| is| plus| times| minus| answer| and|User|Hello| world| of| numbers| question|Assistant"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Pad = Literal["eos", "own"] | None
Bos = Literal["template", "tokenizer", "both", "unused"] | None
Arch = Literal["qwen2", "llama", "gpt2", "mixtral", "glm4_moe"]


def make_tokenizer(
    path: str | Path | None = None,
    *,
    pad: Pad = "eos",
    bos: Bos = None,
    chat_template: str | None = CHAT_TEMPLATE,
    model_max_length: int | None = None,
):
    """A real fast tokenizer (byte-level BPE, ChatML template, eos `<|im_end|>`), saved to `path` if given.

    bos: who writes `<|bos|>` in front: the chat template, the tokenizer's post-processor, both, nobody although the
    token is declared ("unused"), or there is no such token (None). chat_template None: a base model's tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    if chat_template is not None and bos in ("template", "both"):
        chat_template = "{{ bos_token }}" + chat_template
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(adds_bos=bos in ("tokenizer", "both")),
        eos_token=EOS,
        bos_token=BOS if bos else None,
        pad_token={"eos": EOS, "own": PAD, None: None}[pad],
        additional_special_tokens=[HEADER],
        clean_up_tokenization_spaces=False,
        **({} if model_max_length is None else {"model_max_length": model_max_length}),
    )
    tokenizer.chat_template = chat_template
    assert len(tokenizer) == VOCAB_SIZE, f"{len(tokenizer)} ids, expected {VOCAB_SIZE}"
    if path is not None:
        tokenizer.save_pretrained(str(path))
    return tokenizer


def make_model(
    path: str | Path,
    arch: Arch = "qwen2",
    *,
    tie: bool = False,
    pad: Pad = "eos",
    bos: Bos = None,
    chat_template: str | None = CHAT_TEMPLATE,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 2,
    num_kv_heads: int = 2,
    max_positions: int = 512,
    dtype: str = "float32",
    seed: int = 0,
    initializer_range: float = 0.1,
) -> str:
    """Writes a random causal LM and its tokenizer to `path` and returns `path` as a string.

    Defaults give heads of 32, which vLLM's CPU attention takes, and an even number of (kv) heads, which tensor
    parallelism over 2 needs. The wide initializer makes next-token distributions far from uniform.
    """
    import torch
    from transformers import AutoModelForCausalLM

    make_tokenizer(path, pad=pad, bos=bos, chat_template=chat_template)
    config = _model_config(
        arch,
        tie=tie,
        sizes=(num_layers, hidden_size, num_heads, num_kv_heads, max_positions),
        initializer_range=initializer_range,
        pad_token_id={"eos": 2, "own": 0, None: None}[pad],
        bos_token_id=1 if bos else None,
    )
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    torch.set_rng_state(rng_state)
    model.save_pretrained(str(path))
    return str(path)


def _model_config(arch, *, tie, sizes, initializer_range, pad_token_id, bos_token_id):
    from transformers import Glm4MoeConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

    num_layers, hidden_size, num_heads, num_kv_heads, max_positions = sizes
    common = {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": initializer_range,
        "tie_word_embeddings": tie,
        "eos_token_id": 2,
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
    }
    if arch == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(
            n_positions=max_positions, n_embd=hidden_size, n_layer=num_layers, n_head=num_heads, **no_dropout, **common
        )
    classes = {"qwen2": Qwen2Config, "llama": LlamaConfig, "mixtral": MixtralConfig, "glm4_moe": Glm4MoeConfig}
    experts = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "glm4_moe": {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"first_k_dense_replace": 1, "head_dim": hidden_size // num_heads, "n_group": 1, "topk_group": 1},
        },
    }
    return classes[arch](
        **experts.get(arch, {}),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        **common,
    )


def write_jsonl(path: str | Path, rows: list[dict]) -> str:
    """Writes one JSON object a line and returns `path` as a string."""
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _backend(*, adds_bos: bool):
    """The `tokenizers` object: bytes, then the merges that spell the MERGED_WORDS from left to right."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS.split("|"):
        letters = word.replace(" ", "Ġ")
        for end in range(1, len(letters)):
            merge = (letters[:end], letters[end])
            if merge not in merges and len(pieces) < VOCAB_SIZE:
                merges.append(merge)
                pieces.append(letters[: end + 1])
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
        )
    return backend
