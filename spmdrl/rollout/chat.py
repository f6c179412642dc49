"""A conversation with a model: what it is asked, and the answer as it comes."""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

from spmdrl.config.chat import ChatConfig, base_of_adapter
from spmdrl.config.preflight import model_positions
from spmdrl.data.rendering import ChatRenderer, Message, TextRenderer
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import compute_dtype
from spmdrl.errors import UserError
from spmdrl.models.loading import eos_token_ids, load_causal_lm, reading
from spmdrl.models.merge import merge_adapter, tokenizer_folder
from spmdrl.models.tokenizer import encode_texts, load_tokenizer

COMMANDS = "/clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"
AS_TEXT = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
COMMAND = re.compile(r"/[a-zA-Z]+")


class Conversation:
    """The turns so far, and the text that the model goes on from."""

    def __init__(self, config: ChatConfig, tokenizer: Any):
        self.system_prompt = config.system_prompt
        if config.input_template is None and not tokenizer.chat_template:
            raise UserError(
                f"--pretrain {config.model.pretrain}: the tokenizer has no chat template (a base model?): give "
                "--input_template 'User: {}\\nAssistant: ', or a --tokenizer_chat_template"
            )
        self._chat = ChatRenderer(tokenizer) if config.input_template is None else None
        self._around = TextRenderer(config.input_template)
        self.turns: list[Message] = []

    def asking(self, line: str) -> str:
        """The text of the conversation, then of a new line of the user's, up to where its answer begins."""
        turns = [*self.turns, {"role": "user", "content": line}]
        if self._chat is not None:
            system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
            return self._chat([*system, *turns])
        texts = [self._around(t["content"]) if t["role"] == "user" else t["content"] + "\n" for t in turns]
        return "".join([*([] if self.system_prompt is None else [self.system_prompt + "\n"]), *texts])

    def add(self, line: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


class Chat:
    """A model that answers one line at a time and knows what was said before."""

    def __init__(self, config: ChatConfig):
        self.config = config
        self.tokenizer = load_tokenizer(replace(config.model, pretrain=_tokenizer_name(str(config.model.pretrain))))
        self.conversation = Conversation(config, self.tokenizer)
        self.model = load_model(config).to(comm.device()).eval()
        self.eos_ids = eos_token_ids(self.model, self.tokenizer)
        self.model.generation_config = GenerationConfig()  # the checkpoint's penalties and beams are no flags of ours
        positions = model_positions(self.model.config.get_text_config().to_dict())
        self.max_len = config.max_len or positions
        if positions is not None and (config.max_len or 0) > positions:
            raise UserError(
                f"--max_len {config.max_len} is more than the {positions} positions of {config.model.pretrain}"
            )
        torch.manual_seed(config.seed)

    def hear(self, line: str) -> None:
        """Answer a line, or do what it asks for with a slash. Raises UserError for one that is neither."""
        if line == "/clear":
            self.conversation.turns.clear()
        elif COMMAND.fullmatch(line):
            raise UserError(f"there is no command {line}: {COMMANDS}")
        elif any("\ud800" <= letter <= "\udfff" for letter in line):
            raise UserError("the line has bytes that are no UTF-8: it is left out")
        else:
            self.answer(line)

    @torch.no_grad()
    def answer(self, line: str) -> str:
        """Prints the answer to a line as it comes, and returns it. Raises UserError where there is no room for one.

        Ctrl-C ends it early; what was said until then stays in the conversation.
        """
        ids = encode_texts(self.tokenizer, [self.conversation.asking(line)])[0]
        room = self.config.max_new_tokens
        if self.max_len is not None:
            room = min(room, self.max_len - len(ids))
        if room < 1:
            raise UserError(
                f"no room for an answer: {len(ids)} tokens so far, --max_len {self.max_len}; /clear frees it"
            )
        with stopped_by_ctrl_c() as is_stopped:
            out = self._generate(torch.tensor([ids], device=self.model.device), room, is_stopped)
        response = out[len(ids) :]
        ends = next((i for i, token in enumerate(response) if token in self.eos_ids), len(response))
        text = self.tokenizer.decode(response[:ends], **AS_TEXT)
        for stop in self.config.stop:
            text = text.removesuffix(stop)
        self.conversation.add(line, text)
        return text

    def _generate(self, prompt: Tensor, room: int, is_stopped: threading.Event) -> list[int]:
        config = self.config
        out = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=not config.greedy_sampling,
            temperature=1.0 if config.greedy_sampling else config.temperature,
            top_p=1.0 if config.greedy_sampling else config.top_p,
            top_k=0,
            repetition_penalty=config.repetition_penalty,
            max_new_tokens=room,
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_strings=list(config.stop) or None,
            tokenizer=self.tokenizer,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, **AS_TEXT),
            stopping_criteria=StoppingCriteriaList([_Stopped(is_stopped)]),
        )
        return out[0].tolist()


class _Stopped(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


@contextmanager
def stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """Within the block Ctrl-C sets the event instead of raising KeyboardInterrupt."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _tokenizer_name(pretrain: str) -> str:
    base = base_of_adapter(pretrain)
    return pretrain if base is None else tokenizer_folder(Path(pretrain), base)


def load_model(config: ChatConfig) -> Any:
    """The model of --pretrain; an adapter is merged into its base."""
    dtype, name = compute_dtype(config.model.bf16), str(config.model.pretrain)
    base = base_of_adapter(name)
    if base is None:
        return load_causal_lm(config.model, dtype=dtype)
    flag = f"--pretrain {name}, whose base is"
    model = load_causal_lm(replace(config.model, pretrain=base), dtype=dtype, flag=flag)
    with reading(f"--pretrain {name} on {base}", "an adapter and its base"):
        return merge_adapter(model, Path(name))[0]
