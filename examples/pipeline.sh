#!/usr/bin/env bash
# SFT, reward model, PPO with all four roles: two ranks, ZeRO-3, vLLM, on small sums that it makes itself.
# Your own: MODEL=path-or-hub-name DATA=folder bash examples/pipeline.sh, with the folder's layout as make_pipeline_data.py
# writes it. Each stage is judged on held-out questions, before and after; the last lines say what it came to.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/pipeline}
RANKS=${RANKS:-2}
SEED=${SEED:-42}
if [[ -z ${MODEL:-} ]]; then
  MODEL=runs/models/SmolLM2-135M-Instruct
  python examples/prepare_smollm2.py "$MODEL"
fi
if [[ -z ${DATA:-} ]]; then
  DATA=runs/data/pipeline
  python examples/make_pipeline_data.py "$DATA"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > RANKS ? $(nproc) / RANKS : 1 ))}
start=(torchrun --standalone --nproc_per_node "$RANKS")
shared=(--apply_chat_template --seed "$SEED")

# 1. Imitate good answers.
"${start[@]}" cli/train_sft.py "${shared[@]}" \
  --pretrain "$MODEL" --dataset "$DATA/sft" --input_key prompt --output_key answer --max_len 96 \
  --train_batch_size 32 --micro_train_batch_size 16 --max_epochs "${SFT_EPOCHS:-1}" --learning_rate 2e-5 \
  --eval_on_start --save_path "$OUT/sft" --ckpt_path "$OUT/sft/checkpoints"

# 2. Tell good answers from bad ones.
"${start[@]}" cli/train_rm.py "${shared[@]}" \
  --pretrain "$OUT/sft" --dataset "$DATA/pairs" --prompt_key prompt --max_len 96 \
  --train_batch_size 32 --micro_train_batch_size 16 --max_epochs "${RM_EPOCHS:-1}" --learning_rate 3e-5 \
  --eval_on_start --save_path "$OUT/rm" --ckpt_path "$OUT/rm/checkpoints"

# 3. Answer so that the reward model likes it: actor and critic train, reference and reward model score.
"${start[@]}" cli/train_ppo.py "${shared[@]}" \
  --pretrain "$OUT/sft" --reward_pretrain "$OUT/rm" --normalize_reward \
  --prompt_data "$DATA/prompts" --input_key input --prompt_max_len 80 --generate_max_len 16 \
  --advantage_estimator gae --rollout_batch_size 16 --n_samples_per_prompt 4 --max_samples "${PPO_PROMPTS:-192}" \
  --train_batch_size 64 --micro_train_batch_size 32 --micro_rollout_batch_size 32 \
  --actor_learning_rate 2e-5 --critic_learning_rate 2e-5 --init_kl_coef 0.02 --zero_stage 3 \
  --engine vllm --enforce_eager --enable_prefix_caching --vllm_kv_cache_gb 1 \
  --eval_dataset "$DATA/prompts" --eval_steps 6 --eval_on_start --eval_temperature 1.0 --eval_n_samples_per_prompt 2 \
  --save_path "$OUT/ppo" --ckpt_path "$OUT/ppo/checkpoints" "$@"

python - "$OUT" <<'PYTHON'
import json
import sys
from pathlib import Path


def values(stage, name):
    rows = map(json.loads, Path(sys.argv[1], stage, "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if row.get(name) is not None]


for stage, name, what in (
    ("sft", "eval/loss", "loss of held-out answers"),
    ("rm", "eval/accuracy", "accuracy on held-out pairs"),
    ("ppo", "eval/reward", "reward on held-out questions"),
):
    found = values(stage, name)
    print(f"{stage}: {what} {found[0]:.3f} -> {found[-1]:.3f}")
print(f"ppo: KL to the reference {max(values('ppo', 'policy/kl')):.4f} a token at most")
PYTHON
