"""A sweep of one's own in 30 lines: which algorithm wins for which number of tokens? `hipgroupgemm sweep` asks in a grander way."""

import csv
import sys

import hipgroupgemm as hgg

try:
    import cupy

    cupy.zeros(1)
    device = None  # the current GPU
except Exception:
    device = "cpu"
    print("no CuPy with a GPU: this runs on the CPU", file=sys.stderr)

K, N, E = 512, 256, 16
table = csv.writer(sys.stdout)
table.writerow(["tokens", "backend", "algorithm", "verdict", "median_ms", "tflops", "wins"])
for m in (128, 512, 2048):
    specs = hgg.ArraySpec((m, K), "float16"), hgg.ArraySpec((E, K, N), "float16"), hgg.ArraySpec((E,), "int32")
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*specs), device=device) as plan:
        report = plan.autotune(max_algorithms=6, time_limit=60, store=False)
    for row in report.rows:
        a = row.algorithm
        table.writerow([m, a.backend, a.name, row.verdict, row.median_ms, row.tflops, row is report.best])
