"""The micro-benchmark of ragged dots: backends and padded baselines side by side, each result checked.

`hipgroupgemm bench` and `bench/run.py` are its front ends. The modules know no array library by name but `labs`, and no model but
through `hipgroupgemm.workloads`.
"""
