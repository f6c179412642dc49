import pytest

from spmdrl.config import PromptDataConfig
from spmdrl.data.prompts import load_prompts
from tests.tiny import make_tokenizer


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory):
    """What `datasets` caches goes to a folder of the test run."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets_cache")


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def load(tokenizer):
    """load(path, **flags): the prompts of `--prompt_data path` with the session's tokenizer or another one."""

    def load(path, *, tokenizer=tokenizer, seed=0, **flags):
        return load_prompts(PromptDataConfig(prompt_data=str(path), **flags), tokenizer, seed=seed)

    return load
