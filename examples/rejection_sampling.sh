#!/usr/bin/env bash
# Rejection sampling: the model answers each prompt several times, and is fine-tuned on the best answers that are good
# enough. On small sums; your own:
#   MODEL=path-or-hub-name DATA=prompts.jsonl REWARD=path.py:name bash examples/rejection_sampling.sh
# Flags that follow go to cli/generate.py. Started again after a stop, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/rejection_sampling}
RANKS=${RANKS:-2}
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
  template=(--input_template "{}") max_len=96
  lengths=(--prompt_max_len 64 --max_new_tokens 6 --stop $'\n') # the answer stands alone on its line
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) > RANKS ? $(nproc) / RANKS : 1 ))}
start=(torchrun --standalone --nproc_per_node "$RANKS")

if [[ ! -e $OUT/best.jsonl ]]; then
  "${start[@]}" cli/generate.py --pretrain "$MODEL" --dataset "$DATA" --input_key input --label_key label \
    "${template[@]}" "${lengths[@]}" --reward_func "$REWARD" --n_samples_per_prompt 8 \
    --post_processor rs --reward_threshold "${THRESHOLD:-1}" --output_path "$OUT/best.jsonl" "$@"
fi
"${start[@]}" cli/train_sft.py --pretrain "$MODEL" --dataset "$OUT/best.jsonl" --input_key input --output_key output \
  "${template[@]}" --max_len "$max_len" --train_batch_size 32 --micro_train_batch_size 16 \
  --max_epochs "${EPOCHS:-1}" --learning_rate "${LEARNING_RATE:-1e-5}" \
  --save_path "$OUT/model" --ckpt_path "$OUT/model/checkpoints"
