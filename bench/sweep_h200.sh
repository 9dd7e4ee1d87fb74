#!/bin/sh
# Tunes the triton backend on the six classes of three shapes (bf16, balanced sizes) on GPU 0, and writes
# bench/results/h200_tuning_sweep.jsonl and .csv:
#
#     sh bench/sweep_h200.sh                                 # the 8 best guesses of each problem
#     ALGORITHMS=all sh bench/sweep_h200.sh                  # every algorithm
#     LIMIT=540 OUT=$OUT/h200_tuning_sweep sh bench/sweep_h200.sh   # stop after so many seconds, as Ctrl-C does; run it again to go on
#
# Further arguments go to hipgroupgemm sweep. Jobs that are in the .jsonl already are not run again.
set -eu
cd "$(dirname "$0")/.."
OUT=${OUT:-bench/results/h200_tuning_sweep}
exec ${LIMIT:+timeout -s INT -k 30 "$LIMIT"} "${PYTHON:-python3}" -m hipgroupgemm sweep \
    --shape 6400,2048,512,512 --shape 10240,2048,768,128 --shape 3840,2048,1408,64 \
    --dtype bf16 --distribution balanced --backend triton --devices 0 --algorithms "${ALGORITHMS:-heuristic}" \
    --resume "$OUT.jsonl" --csv "$OUT.csv" "$@"
