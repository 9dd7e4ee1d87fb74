"""Expert parallel by group_offset: each rank holds some experts, computes their rows out of all, and the sum of all ranks is the layer."""

import numpy as np

import hipgroupgemm as hgg

try:
    import cupy as xp

    xp.zeros(1)
except Exception:
    xp = np
    print("no CuPy with a GPU: this runs on the CPU, with NumPy arrays")

M, K, N, E, RANKS = 1000, 256, 128, 12, 3  # tokens, embedding, MLP, experts of all ranks, ranks
rng = np.random.default_rng(0)
tokens = xp.asarray(rng.standard_normal((M, K), dtype=np.float32).astype(np.float16))
weights = xp.asarray(rng.standard_normal((E, K, N), dtype=np.float32).astype(np.float16))
sizes = xp.asarray(rng.multinomial(M - 10, rng.dirichlet(np.ones(E))))  # of all experts, the same on every rank; ten rows are nobody's

whole = hgg.ragged_dot(tokens, weights, sizes)
total = xp.zeros((M, N), np.float32)
for rank in range(RANKS):  # in a real run each of these is a process with a GPU of its own, and the sum a collective
    first, mine = rank * E // RANKS, weights[rank * E // RANKS : (rank + 1) * E // RANKS]
    part = hgg.ragged_dot(tokens, mine, sizes, group_offset=first)  # rows of other ranks' experts are zeros
    total += part
    print(f"rank {rank}: experts {first} to {first + len(mine) - 1}, {int((part != 0).any(axis=1).sum())} rows")

error = float(xp.abs(total - whole).max())
print(f"the ranks' sum and the whole layer differ by {error}")
if error != 0:
    raise SystemExit("a row was computed by two ranks, or by none")
