#!/usr/bin/env bash
# Compares eight mixers at equal FLOPs a token, on tiny Shakespeare and on associative recall, with three seeds.
#
#     bash benchmarks/attention_study.sh                                 # both, into runs/attention/shakespeare and recall
#     OUT=runs/mine bash benchmarks/attention_study.sh recall --seeds 5  # one of them, with any more flags of gpt.py
#
# 360 steps for each seed. Before, one other seed chooses a learning rate for each variant among 1e-3, 3e-3 and 1e-2, the
# same search for each. Tiny Shakespeare is in ../shared/data, or in DATA.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
tasks="shakespeare recall"
case "${1:-}" in shakespeare | recall) tasks=$1; shift ;; esac

variants=()
add() { # NAME OPTION=VALUE ...
    local name=$1 option
    shift
    variants+=("--variants.$name" GPT)
    for option in num_layers=2 num_heads=2 embed_dim=64 bias=false norm=rms mlp=swiglu "$@"; do
        variants+=("--variants.$name.${option%%=*}" "${option#*=}")
    done
}
add mha position=rotary
add mqa position=rotary num_kv_heads=1
add window position=rotary window=8
add latent position=rotary mixer=latent
add differential position=rotary mixer=differential
add linear position=null mixer=linear conv=4
add delta position=null mixer=delta
add hybrid position=null mixer=delta softmax_every=2

for task in $tasks; do
    case $task in
        shakespeare) data=(Text --data.path "${DATA:-../shared/data/tinyshakespeare/input.txt}" --data.block_size 64
            --data.batch_size 16) ;;
        recall) data=(Recall --data.block_size 24 --data.vocab_size 32 --data.pairs 4) ;;
    esac
    python experiments/gpt.py --data "${data[@]}" "${variants[@]}" --equal flops --seeds 3 \
        --tune 3 --tune_seeds 1 --search.model.lr "[1e-3,3e-3,1e-2]" --search.model.weight_decay 0.1 --model.lr 3e-3 \
        --trainer.max_epochs 3 --trainer.limit_train_batches 120 --decode_at 1024 \
        --out "${OUT:-runs/attention}/$task" "$@"
done
