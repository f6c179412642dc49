#!/usr/bin/env bash
# Iterative DPO: the model answers, a reward picks the best and the worst answer to each prompt, DPO trains on
# these pairs, and the new model answers again. On small sums; your own:
#   MODEL=path-or-hub-name DATA=prompts.jsonl REWARD=path.py:name bash examples/iterative_dpo.sh
# Flags that follow go to cli/generate.py. Started again after a stop, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/iterative_dpo}
RANKS=${RANKS:-2}
ROUNDS=${ROUNDS:-2}
REWARD=${REWARD:-examples/rewards/arithmetic.py:reward_func}
if [[ -z ${MODEL:-} ]]; then
  MODEL=runs/models/SmolLM2-135M-Instruct
  python examples/prepare_smollm2.py "$MODEL"
fi
template=(--apply_chat_template)
lengths=(--prompt_max_len 512 --max_new_tokens 256)
max_len=768
if [[ -z ${DATA:-} ]]; then
  DATA=runs/data/arithmetic.jsonl
  python examples/make_arithmetic.py "$DATA" --num 312
  template=() max_len=96
  lengths=(--prompt_max_len 64 --max_new_tokens 6 --stop $'\n') # the answer stands alone on its line
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > RANKS ? $(nproc) / RANKS : 1 ))}
start=(torchrun --standalone --nproc_per_node "$RANKS")

for ((round = 1; round <= ROUNDS; round++)); do
  pairs=$OUT/pairs_$round.jsonl
  if [[ ! -e $pairs ]]; then
    "${start[@]}" cli/generate.py --pretrain "$MODEL" --dataset "$DATA" --input_key input --label_key label \
      "${template[@]}" "${lengths[@]}" --reward_func "$REWARD" --seed "$round" \
      --n_samples_per_prompt 8 --post_processor iter_dpo --output_path "$pairs" "$@"
  fi
  if [[ ! -e $OUT/model_$round/config.json ]]; then
    "${start[@]}" cli/train_dpo.py --pretrain "$MODEL" --dataset "$pairs" --prompt_key input "${template[@]}" \
      --max_len "$max_len" --train_batch_size 32 --micro_train_batch_size 16 --learning_rate "${LEARNING_RATE:-5e-6}" \
      --save_path "$OUT/model_$round" --ckpt_path "$OUT/model_$round/checkpoints"
  fi
  MODEL=$OUT/model_$round
done
echo "the last model is in $MODEL; the mean rewards above are of the models before each round"
