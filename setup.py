"""Package metadata. A machine with GPUs: `pip install -e .[vllm,wandb,peft]`; without: see README."""

from setuptools import find_packages, setup

setup(
    name="spmdrl",
    version="0.1.0",
    description="RLHF on one node or a Slurm allocation: one SPMD program, DeepSpeed ZeRO and in-process vLLM",
    python_requires=">=3.10",
    packages=find_packages(include=["spmdrl", "spmdrl.*"]),
    install_requires=["torch", "deepspeed", "transformers>=5", "accelerate", "datasets", "tyro", "pyyaml", "tqdm"],
    extras_require={
        "vllm": ["vllm"],
        "flash-attn": ["flash-attn"],
        "peft": ["peft"],
        "4bit": ["bitsandbytes"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "plot": ["matplotlib"],
        "math": ["math-verify"],
        "remote": ["httpx2"],
        "serve": ["starlette", "uvicorn"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "pyright[nodejs]"],
    },
)
