"""One grouped GEMM: tokens that are sorted by expert, one weight matrix an expert, and the sizes that a router decided on."""

import numpy as np

import hipgroupgemm as hgg

try:
    import cupy as xp

    xp.zeros(1)  # CuPy may be there and a GPU not
except Exception:
    xp = np
    print("no CuPy with a GPU: this runs on the CPU, with NumPy arrays")

M, K, N, E = 2048, 512, 256, 16  # tokens, embedding, MLP, experts
rng = np.random.default_rng(0)
tokens = xp.asarray(rng.standard_normal((M, K), dtype=np.float32).astype(np.float16))
weights = xp.asarray(rng.standard_normal((E, K, N), dtype=np.float32).astype(np.float16))
sizes = xp.asarray(rng.multinomial(M, np.full(E, 1 / E)))  # rows of each expert; on a GPU they stay there

out = hgg.ragged_dot(tokens, weights, sizes)  # (M, N), an array of the same kind, on the current stream

# the same, expert by expert
ends = np.cumsum(sizes.tolist())
wanted = xp.concatenate(
    [
        tokens[end - size : end].astype("f4") @ weights[e].astype("f4")
        for e, (end, size) in enumerate(zip(ends, sizes.tolist(), strict=True))
    ]
)
error = float(xp.linalg.norm(out.astype("f4") - wanted) / xp.linalg.norm(wanted))
print(f"{type(out).__module__} {out.dtype} {out.shape}, relative error {error:.1e}")
if not error < 1e-3:
    raise SystemExit("the result is wrong")
