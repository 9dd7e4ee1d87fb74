"""Device time of a transformers experts module, forward and backward, beside the library's own implementations, in one process.

    python bench/transformers_experts.py [--tokens N ...] [--csv FILE]

Qwen3-30B-A3B's experts (hidden 2048, intermediate 768, 128 experts, 8 per token) in bf16 with random routing. The median of CUDA events
around forward and backward, 256 MiB overwritten before each.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hipgroupgemm.integrations.transformers import register

IMPLEMENTATIONS = ("hipgroupgemm", "grouped_mm", "eager")


def median_of(step: Any, repetitions: int) -> float:
    """Milliseconds."""
    spoil, times = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        spoil.zero_()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Measures, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--csv", default=str(Path(os.environ.get("OUT", ".")) / "transformers_experts.csv"))
    options = parser.parse_args()
    register()
    config = transformers.Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    experts = Qwen3MoeExperts(config).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    table = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for tokens in options.tokens:
        hidden = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights, index = torch.rand(tokens, 128, device="cuda").topk(8)
        gradient = torch.randn_like(hidden)

        def step(hidden: Any = hidden, index: Any = index, weights: Any = weights, gradient: Any = gradient) -> None:
            out = experts(hidden, index, weights)
            torch.autograd.grad(out, (hidden, *experts.parameters()), gradient)

        for implementation in IMPLEMENTATIONS:
            config._experts_implementation = implementation
            for _ in range(3):
                step()
            table.append((tokens, implementation, median_of(step, options.repetitions)))
            print(f"{tokens:6} tokens  {implementation:14} {table[-1][2]:8.3f} ms")
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("tokens", "implementation", "median_ms"), *table])


if __name__ == "__main__":
    main()
