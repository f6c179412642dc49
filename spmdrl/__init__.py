"""RLHF in one SPMD program: DeepSpeed ZeRO for training, in-process vLLM for sampling."""
