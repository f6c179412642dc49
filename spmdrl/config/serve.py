"""The flags of cli/serve_rm.py."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spmdrl.config import checks
from spmdrl.config.foreign import NOT_YET, Foreign
from spmdrl.config.heads import check_head
from spmdrl.config.preflight import check_models, check_packages, is_installed
from spmdrl.config.sections import ModelConfig
from spmdrl.errors import UserError

RANGES: dict[str, checks.Range] = {
    "port": (lambda x: 0 <= x < 65536, "from 0 (any that is free) to 65535"),
    "batch_size": (lambda x: x >= 1, "at least 1"),
    "max_len": (lambda x: x >= 1, "at least 1"),
    "max_request_mb": (lambda x: x > 0, "above 0"),
    "value_head_prefix": checks.RANGES["value_head_prefix"],
}


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig:
    """Serve a reward model over HTTP, for --remote_rm_url of cli/train_ppo.py: {"query": [texts]}, posted to
    /get_reward, is answered by {"rewards": [scores]}. A text is scored at its last token: end it with the EOS that
    ends a response. Where the environment variable SPMDRL_RM_TOKEN has a bearer token, it is asked for. GET /health
    answers once the model is there."""

    foreign: ClassVar[Foreign] = Foreign(
        not_yet={"load_in_4bit": "the model is served in --bf16; drop it", "use_ms": NOT_YET["use_ms"]},
        refused={"packing_samples": "texts of all requests share forwards, padded to the longest; drop it"},
        other_names={"pretrain": "reward_pretrain", "model": "reward_pretrain"},
    )

    reward_pretrain: str | None = None
    """Reward model: a checkpoint with a scalar head, directory or hub name."""
    value_head_prefix: str = "score"
    """Name of the head in the checkpoint; score, value_head and v_head are found too."""
    normalize_reward: bool = False
    """Subtract the mean of the model's scores and divide by their standard deviation, as its config has them."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine."""
    port: int = 5000
    """Port to listen at; 0 takes one that is free, and says which."""
    max_len: int | None = None
    """Most tokens of a text; a request with a longer one is refused. Left out: the model's positions."""
    batch_size: int = 16
    """Texts of one forward, of all requests that wait."""
    max_request_mb: float = 64.0
    """Largest request in MiB."""
    bf16: bool | None = None
    """Score in bfloat16. Left out: bfloat16 where the device computes in it, otherwise fp32."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """Attention kernel; auto takes flash_attention_2 where installed, otherwise sdpa."""
    trust_remote_code: bool = False
    """Run model code that a checkpoint brings along."""
    disable_fast_tokenizer: bool = False
    """Use the slow (Python) tokenizer."""

    def validate(self, world_size: int) -> None:
        if not self.reward_pretrain:
            raise UserError("--reward_pretrain is missing: the Hugging Face directory or hub name of the reward model")
        for name, (is_valid, wanted) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise UserError(f"--{name} must be {wanted}, got {value}")
        if world_size > 1:
            raise UserError(f"one process serves, not {world_size}: start it with python, several on several ports")
        for package in ("starlette", "uvicorn"):
            if not is_installed(package):
                raise UserError(f"cli/serve_rm.py needs the package {package}: pip install {package}")
        check_packages(self)
        check_models({"reward_pretrain": self.reward_pretrain})
        check_head("reward_pretrain", self.reward_pretrain, self.value_head_prefix)

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            pretrain=self.reward_pretrain,
            bf16=self.bf16,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
            disable_fast_tokenizer=self.disable_fast_tokenizer,
        )
