#!/usr/bin/env bash
# GRPO on sums and differences: two ranks, ZeRO-3, vLLM, a reference model. `make demo` runs this.
# Your own: MODEL=path-or-hub-name DATA=prompts.jsonl bash examples/grpo_arithmetic.sh --more_flags ...
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/demo}
RANKS=${RANKS:-2}
SEED=${SEED:-42}
if [[ -z ${MODEL:-} ]]; then
  MODEL=runs/models/SmolLM2-135M-Instruct
  python examples/prepare_smollm2.py "$MODEL"
fi
prompts=(--apply_chat_template --prompt_max_len 512 --generate_max_len 256)
if [[ -z ${DATA:-} ]]; then
  DATA=runs/data/arithmetic.jsonl
  python examples/make_arithmetic.py "$DATA" --num 312
  prompts=(--prompt_max_len 64 --generate_max_len 6 --stop $'\n') # the answer stands alone on its line
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > RANKS ? $(nproc) / RANKS : 1 ))}

torchrun --standalone --nproc_per_node "$RANKS" cli/train_ppo.py \
  --pretrain "$MODEL" \
  --prompt_data "$DATA" --input_key input --label_key label "${prompts[@]}" \
  --reward_func examples/rewards/arithmetic.py:reward_func \
  --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.001 \
  --rollout_batch_size 12 --n_samples_per_prompt 8 \
  --train_batch_size 96 --micro_train_batch_size 48 --micro_rollout_batch_size 48 \
  --actor_learning_rate 3e-5 --lr_warmup_ratio 0.2 --zero_stage 3 \
  --engine vllm --enforce_eager --enable_prefix_caching --vllm_kv_cache_gb 1 \
  --seed "$SEED" --save_path "$OUT" "$@"
