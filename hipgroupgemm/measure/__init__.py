"""One way to measure and to check: inputs, poison, sizes, checks, timer, roofline, workloads, tolerances."""
