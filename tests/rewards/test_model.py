"""Reward models: the score at the last real token, and ids that mean the same to policy and reward model."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from spmdrl.config import ModelConfig
from spmdrl.data.rendering import ChatRenderer
from spmdrl.errors import UserError
from spmdrl.models.packing import layout_for
from spmdrl.models.tokenizer import encode_texts, load_tokenizer
from spmdrl.models.value_head import load_reward_model
from spmdrl.rewards.model import ModelReward, make_encoder, policy_ids, score_sequences
from spmdrl.rewards.source import RewardBatch, RewardError
from tests.rewards.reward_models import edit_config, make_reward_model, permuted, plain_scores
from tests.tiny import EOS, make_model, make_tokenizer

FLAG = "--reward_pretrain"


def load(path, **options):
    options = {"flag": FLAG, "value_head_prefix": "score", "dtype": torch.float32} | options
    return load_reward_model(str(path), ModelConfig(), **options).eval()


def sequences_of(*lengths, end=2, seed=0):
    """Random ids, each sequence ended by `end`, which is EOS and the pad token of the model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.tensor([*torch.randint(4, 300, (n - 1,), generator=generator).tolist(), end]) for n in lengths]


# ---- scores ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("end", [2, 9])
def test_scores_are_those_of_transformers_at_the_last_token(tmp_path, arch, end):
    """Whether that is EOS, which is the pad token too, or not; in any micro-batches."""
    make_model(tmp_path / "model", arch)
    file = tmp_path / "model" / "model.safetensors"
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    save_file(load_file(file) | {"score.weight": head}, file, metadata={"format": "pt"})
    sequences = sequences_of(3, 17, 1, 5, 8, 17, end=end)
    model = load(tmp_path / "model")
    expected = plain_scores(tmp_path / "model", sequences)
    assert len({round(score, 2) for score in expected}) == 6
    for size in (1, 2, 6):
        scores = score_sequences(model, sequences, micro_batch_size=size).tolist()
        assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_responses_to_a_prompt_are_scored_in_one_row(tmp_path, monkeypatch):
    """Of three prompts of 60 tokens with four responses each, the longest of which are as long as one another, so that
    by length alone they would be mixed. The scores are those of one sequence at a time."""
    model = load(make_reward_model(tmp_path / "model"))
    model.layout = layout_for(model.model)
    starts = [prompt[:-1] for prompt in sequences_of(61, 61, 61)]
    ends = sequences_of(*[9, 3, 6, 4] * 3, seed=1)
    sequences = [torch.cat([starts[i // 4], end]) for i, end in enumerate(ends)]
    order = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]  # prompts alternate
    prompts = [str(i // 4) for i in order]
    seen = []
    monkeypatch.setattr(model.model.base_model.embed_tokens, "forward", partial(embed, model, seen))
    options = {"micro_batch_size": 4, "prompts": prompts}
    scores = score_sequences(model, [sequences[i] for i in order], **options)
    assert len(seen) == 3 and all(rows == 1 for rows, _ in seen)
    assert max(tokens for _, tokens in seen) <= 60 + 22 + 8
    alone = [float(score_sequences(model, [sequences[i]], micro_batch_size=1)) for i in order]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 2) for score in alone}) > 6


def embed(model, seen, ids):
    """The embeddings, noting the shape of what they are asked for."""
    seen.append(tuple(ids.shape))
    return torch.nn.functional.embedding(ids, model.model.base_model.embed_tokens.weight)


def test_scores_do_not_depend_on_the_pad_token_of_the_model(tmp_path):
    sequences = sequences_of(4, 9, 6)
    found = []
    path = make_reward_model(tmp_path / "model")
    for pad in (2, 0, None):
        edit_config(path, pad_token_id=pad)
        found.append(score_sequences(load(path), sequences, micro_batch_size=3).tolist())
    assert found[0] == found[1] == found[2]


def test_no_sequences_are_no_forward():
    assert score_sequences(None, [], micro_batch_size=4).shape == (0,)


def test_a_model_without_a_trained_head_is_refused(tmp_path):
    path = make_model(tmp_path / "model", "llama")
    with pytest.raises(UserError) as error:
        load(path, value_head_prefix="rm_head")
    assert str(error.value).startswith(
        f"{FLAG} {path}: no trained head in it (none of rm_head, score, value_head, v_head), so it is no reward model"
    )
    assert load(path, seed=1).has_new_head  # one that is to be trained


@pytest.mark.parametrize(
    ("mean", "std", "found"), [(1.5, 2.0, (1.5, 2.0)), (None, 2.0, None), (1, None, None), (0, 3, (0.0, 3.0))]
)
def test_mean_and_std_are_read_from_the_config(tmp_path, mean, std, found):
    assert load(make_reward_model(tmp_path / "model", mean=mean, std=std)).normalization == found


@pytest.mark.parametrize("std", [0.0, -1.0])
def test_a_std_that_nothing_can_be_divided_by_is_refused(tmp_path, std):
    with pytest.raises(UserError, match=f"--normalize_reward: the config of .* has mean 0.5 and std {std}"):
        _ = load(make_reward_model(tmp_path / "model", mean=0.5, std=std)).normalization


# ---- as a source ----------------------------------------------------------------------------------------------------
def batch_of(*responses, prompt="Hi:", cell=None, sequences=()):
    """Responses that end in EOS, and those that do not."""
    texts = [response.removesuffix(EOS) for response in responses]
    return RewardBatch(
        queries=[prompt + text for text in texts],
        prompts=[prompt] * len(texts),
        labels=[None] * len(texts),
        columns={},
        sample_ids=[f"row 1, sample {i}" for i in range(len(texts))],
        endings=[response[len(text) :] for response, text in zip(responses, texts, strict=True)],
        cells=[cell] * len(texts),
        sequences=sequences,
    )


def source(scores, **options):
    return ModelReward("reward model m", lambda sequences, prompts: torch.tensor(scores), policy_ids, **options)


def test_scores_are_normalised_by_the_models_own_mean_and_std():
    batch = batch_of("a", "b", sequences=sequences_of(2, 2))
    reward = source([1.5, 5.5], normalization=(1.5, 2.0))
    assert reward(batch).rewards.tolist() == [0.0, 2.0]
    assert reward.normalizes
    plain = source([1.5, 5.5])
    assert plain(batch).rewards.tolist() == [1.5, 5.5]
    assert not plain.normalizes


def test_a_score_that_is_no_number_is_an_error():
    with pytest.raises(RewardError, match="reward model m returned nan for row 1, sample 1, not a finite fp32 number"):
        source([1.0, float("nan")])(batch_of("a", "b", sequences=sequences_of(2, 2)))


def test_a_sequence_that_is_too_long_for_the_model_is_an_error():
    with pytest.raises(UserError, match="reward model m: row 1, sample 1 has 6 tokens, the model reads 5"):
        source([1.0, 2.0], max_len=5)(batch_of("a", "b", sequences=sequences_of(5, 6)))


# ---- tokenizers -----------------------------------------------------------------------------------------------------
def test_a_model_with_other_ids_for_the_same_tokens_gives_the_same_scores(tmp_path):
    """U19: the policy's ids would be nonsense to it."""
    permutation = torch.randperm(320, generator=torch.Generator().manual_seed(5)).tolist()
    same = make_reward_model(tmp_path / "same")
    other = permuted(make_reward_model(tmp_path / "other"), permutation)
    tokenizer = load_tokenizer(ModelConfig(pretrain=same))
    responses = f" the answer is 3{EOS}", " What?", f"User: and{EOS}"
    sequences = [torch.tensor(ids) for ids in encode_texts(tokenizer, [f"Hi:{r}" for r in responses])]
    batch = batch_of(*responses, sequences=sequences)
    scores = []
    for path, how in ((same, "reads the ids of the policy"), (other, "its tokenizer is another one: responses are")):
        encode, line = make_encoder(tokenizer, load_tokenizer(ModelConfig(pretrain=path)), apply_chat_template=False)
        assert line.startswith(how)
        scores.append(score_sequences(load(path), encode(batch), micro_batch_size=4).tolist())
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)
    assert scores[0] == pytest.approx(plain_scores(same, sequences), abs=1e-5)


OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_model_with_another_chat_template_reads_the_conversation_in_its_own():
    """With the EOS that ended the response, and without one where it was cut."""
    policy, own = make_tokenizer(), make_tokenizer(chat_template=OTHER_TEMPLATE)
    cell = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1"}]
    encode, line = make_encoder(policy, own, apply_chat_template=True)
    assert line.endswith("decoded, and encoded again in its own chat template")
    batch = batch_of(f"2{EOS}", "2 is", prompt=ChatRenderer(policy)(cell), cell=cell)
    texts = [own.decode(ids) for ids in encode(batch)]
    assert texts == [f"[system]Sum.[user]1+1[assistant]2{EOS}", "[system]Sum.[user]1+1[assistant]2 is"]


def test_tools_of_a_row_are_in_that_conversation_too():
    policy, own = make_tokenizer(), make_tokenizer(chat_template="{{ tools[0].name }}" + OTHER_TEMPLATE)
    encode, _ = make_encoder(policy, own, apply_chat_template=True)
    batch = batch_of("2", prompt=ChatRenderer(policy)("1+1"), cell="1+1")
    batch = replace(batch, columns={"tools": [[{"name": "sum"}]]})
    assert [own.decode(ids) for ids in encode(batch)] == ["sum[user]1+1[assistant]2"]


def test_a_chat_template_that_ends_turns_with_a_token_of_its_own_ends_responses_with_it():
    policy = make_tokenizer()
    own = make_tokenizer(
        chat_template=OTHER_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}<|endoftext|>\n")
    )
    encode, _ = make_encoder(policy, own, apply_chat_template=True)
    batch = batch_of(f"2{EOS}", prompt=ChatRenderer(policy)("1+1"), cell="1+1")
    assert [own.decode(ids) for ids in encode(batch)] == ["[user]1+1<|endoftext|>\n[assistant]2<|endoftext|>"]


@pytest.mark.parametrize(
    ("own", "apply_chat_template"),
    [({}, True), ({"chat_template": OTHER_TEMPLATE}, False), ({"chat_template": None}, True)],
)
def test_ids_are_reused_where_they_mean_the_same(own, apply_chat_template):
    """The same template, one that is not used, or none."""
    encode, _ = make_encoder(make_tokenizer(), make_tokenizer(**own), apply_chat_template=apply_chat_template)
    sequences = sequences_of(3, 4)
    assert encode(batch_of("a", "b", sequences=sequences)) is sequences


@pytest.mark.parametrize(("policys", "own"), [("tokenizer", "unused"), ("unused", "tokenizer"), ("both", "template")])
def test_a_model_whose_texts_begin_otherwise_reads_them_as_it_was_trained_to(policys, own):
    """The same vocabulary, and a BOS in front of the texts of one of the two only."""
    policy, own = make_tokenizer(bos=policys, chat_template=None), make_tokenizer(bos=own, chat_template=None)
    encode, line = make_encoder(policy, own, apply_chat_template=False)
    assert line.startswith("its texts begin otherwise: responses are decoded, and encoded again")
    (query,) = encode_texts(policy, [f"Hi: 2{EOS}"])
    batch = batch_of(f" 2{EOS}", prompt="Hi:", sequences=[torch.tensor(query)])
    assert [ids.tolist() for ids in encode(batch)] == encode_texts(own, [f"Hi: 2{EOS}"]) != [query]


def test_a_prompt_that_its_template_refuses_is_named():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + OTHER_TEMPLATE
    policy, own = make_tokenizer(), make_tokenizer(chat_template=refusing)
    encode, _ = make_encoder(policy, own, apply_chat_template=True)
    cell = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1"}]
    reward = ModelReward("reward model m", lambda sequences, prompts: torch.zeros(len(sequences)), encode)
    message = "^reward model m: the prompt of row 1, sample 0 is refused by the chat template"
    with pytest.raises(UserError, match=message):
        reward(batch_of("2", prompt=ChatRenderer(policy)(cell), cell=cell))


@pytest.mark.parametrize("apply_chat_template", [False, True])
def test_a_tokenizer_without_eos_ends_responses_with_nothing(apply_chat_template):
    policy, own = make_tokenizer(), make_tokenizer(pad="own", chat_template=OTHER_TEMPLATE)
    own.add_tokens(["new"])  # another vocabulary
    own.eos_token = None
    encode, _ = make_encoder(policy, own, apply_chat_template=apply_chat_template)
    (ids,) = encode(
        batch_of(
            "2",
            prompt=ChatRenderer(policy)("1+1"),
            cell="1+1",
        )
    )
    assert own.decode(ids).endswith("2")


def test_a_tokenizer_that_adds_bos_adds_one(tmp_path):
    path = make_reward_model(tmp_path / "bos", bos="tokenizer")
    own = AutoTokenizer.from_pretrained(path)
    own.add_tokens(["new"])  # another vocabulary
    encode, _ = make_encoder(make_tokenizer(), own, apply_chat_template=False)
    (ids,) = encode(batch_of(f"a{EOS}"))
    assert (ids == own.bos_token_id).sum() == 1
    assert ids[0] == own.bos_token_id and ids[-1] == own.eos_token_id
