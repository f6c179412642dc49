#!/usr/bin/env bash
# The same training on several nodes without Slurm. Run this on every node, with the same flags and the node's number:
#   examples/torchrun_two_nodes.sh NODE_RANK MASTER_ADDR --pretrain ... --prompt_data ... --reward_func ...
# NODE_RANK: 0 on the first node, 1 on the second, ...   MASTER_ADDR: name or address of the first node
# NNODES (2), NPROC_PER_NODE (the node's GPUs, or 1) and MASTER_PORT (29500) can be set in the environment.
#
# The model, the data and --save_path must be at the same place on every node; checkpoints are written by node 0.
# With several networks name the interface between the nodes: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
set -euo pipefail
node_rank=${1:?usage: torchrun_two_nodes.sh NODE_RANK MASTER_ADDR FLAGS...}
master_addr=${2:?usage: torchrun_two_nodes.sh NODE_RANK MASTER_ADDR FLAGS...}
shift 2
# Asked to stop (SIGTERM or Ctrl-C on any node), a run has so many seconds for its checkpoint before torchrun kills it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)

exec torchrun \
  --nnodes "${NNODES:-2}" --node_rank "$node_rank" \
  --nproc_per_node "${NPROC_PER_NODE:-$((num_gpus > 0 ? num_gpus : 1))}" \
  --master_addr "$master_addr" --master_port "${MASTER_PORT:-29500}" \
  "$(dirname "$0")/../cli/train_ppo.py" "$@"
