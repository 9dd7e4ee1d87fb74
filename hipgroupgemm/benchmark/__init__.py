"""The micro-benchmark of ragged dots: backends and padded baselines side by side, each result checked.

`hipgroupgemm bench` and `bench/run.py` are its front ends. It stands on `measure`: the harness, the check, the timer, the workloads.
"""
