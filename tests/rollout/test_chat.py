"""A conversation: what the model is asked, what it remembers, and the ways to stop it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from spmdrl.config import LoraConfig
from spmdrl.config.chat import ChatConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError
from spmdrl.models.lora import MERGED_CONFIG, add_lora
from spmdrl.rollout.chat import Chat, Conversation
from tests.launched import ROOT
from tests.tiny import make_model, make_tokenizer

FLAGS = ["--max_new_tokens", "8", "--greedy_sampling", "--no_bf16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("chat") / "model", arch="llama")


def chat_with(path, *flags):
    return Chat(read_config(ChatConfig, ["--pretrain", str(path), *FLAGS, *flags]))


def plain_answer(path, text, num_tokens=8):
    """The most likely continuation of a rendered text, by transformers alone."""
    from transformers import AutoModelForCausalLM

    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def assistant(text):
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


# ---- what it is asked -----------------------------------------------------------------------------------------------
def conversation(*flags, **tokenizer):
    return Conversation(read_config(ChatConfig, list(flags)), make_tokenizer(**tokenizer))


def test_a_question_is_rendered_with_all_that_was_said():
    talk = conversation("--system_prompt", "Be kind.")
    system = "<|im_start|>system\nBe kind.<|im_end|>\n"
    begins = "<|im_start|>assistant\n"
    assert talk.asking("Hi") == system + user("Hi") + begins
    talk.add("Hi", "Yes?")
    assert talk.asking("Bye") == system + user("Hi") + assistant("Yes?") + user("Bye") + begins


def test_a_text_template_goes_around_each_line():
    flags = ("--input_template", r"User: {}\nBot:", "--system_prompt", "A talk.")
    talk = conversation(*flags, chat_template=None)
    talk.add("Hi", " Yes?")
    assert talk.asking("Bye") == "A talk.\nUser: Hi\nBot: Yes?\nUser: Bye\nBot:"


def test_a_model_without_a_chat_template_needs_a_text_template():
    with pytest.raises(UserError, match=r"no chat template .a base model\?.: give --input_template 'User: {}"):
        conversation(chat_template=None)


# ---- what it answers ------------------------------------------------------------------------------------------------
def test_answers_are_printed_and_remembered(model, capsys):
    chat = chat_with(model)
    first = chat.answer("Hello")
    assert capsys.readouterr().out == first + "\n"
    assert first == plain_answer(model, user("Hello") + "<|im_start|>assistant\n")
    second = chat.answer("What is 2 plus 2?")
    text = user("Hello") + assistant(first) + user("What is 2 plus 2?") + "<|im_start|>assistant\n"
    assert second == plain_answer(model, text)
    chat.conversation.turns.clear()
    assert chat.answer("Hello") == first


def test_answers_are_those_of_the_flags_and_not_of_the_generation_config(model, tmp_path, capsys):
    """With the penalty and the suppressed tokens of the checkpoint the answer would be another."""
    from transformers import AutoTokenizer

    changed = shutil.copytree(model, tmp_path / "changed")
    settings = {"repetition_penalty": 30.0, "suppress_tokens": list(range(4, 150)), "num_beams": 2, "top_k": 1}
    path = changed / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tokenizer = AutoTokenizer.from_pretrained(changed)
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(changed)
    for flags in ([], ["--no_greedy_sampling", "--seed", "3"]):
        assert chat_with(changed, *flags).answer("Hello") == chat_with(model, *flags).answer("Hello")


def test_sampled_answers_follow_from_the_seed(model):
    def answers(*flags):
        chat = Chat(read_config(ChatConfig, ["--pretrain", model, "--max_new_tokens", "8", *flags]))
        return [chat.answer("Hello"), chat.answer("Hello")]

    hot = ("--temperature", "1.0", "--top_p", "1.0")
    assert answers(*hot) == answers(*hot)
    assert answers(*hot) != answers(*hot, "--seed", "7")


def test_a_stop_string_ends_an_answer_and_is_not_remembered(model):
    chat = chat_with(model)
    whole = chat.answer("Hello")
    middle = whole[2:4]
    chat = chat_with(model, "--stop", middle)
    assert chat.answer("Hello") == whole[: whole.index(middle)]


def test_a_conversation_that_is_full_says_so_and_goes_on_once_cleared(model):
    chat = chat_with(model, "--max_len", "40")
    chat.answer("Hello")
    with pytest.raises(UserError, match=r"no room for an answer: \d+ tokens so far, --max_len 40; /clear frees it"):
        chat.answer("and a long question " * 4)
    assert len(chat.conversation.turns) == 2
    chat.conversation.turns.clear()
    chat.answer("Hello")


def test_more_tokens_than_the_model_reads_are_refused(model):
    with pytest.raises(UserError, match="--max_len 513 is more than the 512 positions"):
        chat_with(model, "--max_len", "513")


def test_the_folder_of_an_adapter_is_the_merged_model(model, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from spmdrl.models.lora import write_adapter

    trained = AutoModelForCausalLM.from_pretrained(model)
    add_lora(trained, LoraConfig(lora_rank=2), seed=1)
    for name, weight in trained.named_parameters():
        if ".lora_B." in name:
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    weights = {
        f"base_model.model.{name.replace('.default', '')}": weight
        for name, weight in trained.state_dict().items()
        if ".lora_" in name
    }
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(trained, weights, adapter, AutoModelForCausalLM.from_pretrained(model).config)
    assert (adapter / MERGED_CONFIG).exists()
    make_tokenizer(adapter)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    answer = chat_with(adapter).answer("Hello")
    assert answer == plain_answer(tmp_path / "merged", user("Hello") + "<|im_start|>assistant\n")
    assert answer != chat_with(model).answer("Hello")
    for file in adapter.glob("*token*"):  # as peft saves an adapter: the tokenizer is with the base
        file.unlink()
    assert chat_with(adapter).answer("Hello") == answer


def test_lines_that_are_no_question_are_one_line(model):
    chat = chat_with(model)
    for line, message in (
        ("/help", "^there is no command /help: /clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C "),
        ("/Quit", "^there is no command /Quit: "),
        ("caf\udce9?", "^the line has bytes that are no UTF-8: it is left out$"),
    ):
        with pytest.raises(UserError, match=message):
            chat.hear(line)
    chat.hear("/etc/hosts?")
    chat.hear("Hello")
    assert len(chat.conversation.turns) == 4
    chat.hear("/clear")
    assert chat.conversation.turns == []


def test_a_damaged_adapter_is_one_line(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": model, "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(UserError) as error:
        chat_with(adapter)
    message = f"--pretrain {adapter} on {model}: cannot load an adapter and its base: SafetensorError: "
    assert str(error.value).startswith(message)


# ---- in the terminal ------------------------------------------------------------------------------------------------
def start(model, *flags):
    command = [sys.executable, str(ROOT / "cli" / "chat.py"), "--pretrain", str(model), *flags]
    pipe = subprocess.PIPE
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as where the language of the system is not C
    text = {"text": True, "errors": "surrogateescape", "bufsize": 1, "env": strict}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, **text)


@pytest.mark.slow
def test_lines_from_a_pipe_are_answered_until_they_end(model):
    hello = plain_answer(model, user("Hello") + "<|im_start|>assistant\n")
    lines = ["Hello", "", "/clear", "/help", "\udcff?", "Hello", "y" + " y" * 600, "/quit", "Hello"]
    out, err = start(model, *FLAGS).communicate("\n".join(lines), timeout=120)
    assert out == f"{hello}\n{hello}\n", err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line[:30] for line in said] == [
        "error: there is no command /he",
        "error: the line has bytes that",
        "error: no room for an answer: ",
    ]
    process = start(model, *FLAGS)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()  # whoever reads has heard enough
    process.stdin.write("Hello\n")
    process.stdin.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(120) == 0


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_chat(tmp_path):
    """A random model, asked for what is most likely, says the same for ever: the answer would have 400,000 tokens."""
    model = make_model(tmp_path / "model", arch="llama", max_positions=10**6)
    process = start(model, "--max_new_tokens", "400000", "--greedy_sampling", "--no_bf16")
    assert process.stdin and process.stdout
    process.stdin.write("Hello\n")
    assert process.stdout.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("/nothing\n", timeout=60)
    assert process.returncode == 0, err
    assert err.endswith(
        "error: there is no command /nothing: /clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops "
        "an answer\n"
    )
