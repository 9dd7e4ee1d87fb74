"""Sweeps: tuning over lists of problems and devices (`hipgroupgemm sweep`), and what sets two of them apart (`hipgroupgemm report`)."""
