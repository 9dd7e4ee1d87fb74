"""Training an MoE layer in JAX: two ragged dots under jit and grad, beside a loop over the experts; both losses go down alike."""

import jax
import jax.numpy as jnp

from hipgroupgemm.integrations.jax import ragged_dot

TOKENS, HIDDEN, INNER, EXPERTS = 256, 32, 48, 4
keys = jax.random.split(jax.random.key(0), 5)
x, target = (jax.random.normal(key, (TOKENS, HIDDEN)) for key in keys[:2])
router = jax.random.normal(keys[2], (HIDDEN, EXPERTS))
shapes = ((EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN))
weights = tuple(jax.random.normal(key, shape) / shape[1] ** 0.5 for key, shape in zip(keys[3:], shapes, strict=True))

expert = jnp.argmax(x @ router, axis=1)  # each token goes to one expert
order = jnp.argsort(expert)
sizes = jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)


def by_ragged_dots(up, down):
    """The experts' results, in the tokens' order."""
    rows = ragged_dot(jax.nn.silu(ragged_dot(x[order], up, sizes)), down, sizes)
    return jnp.zeros_like(rows).at[order].set(rows)


def by_loop(up, down):
    """The same by every expert on all tokens, of which each keeps its own."""
    results = [jax.nn.silu(x @ up[e]) @ down[e] for e in range(EXPERTS)]
    return sum(jnp.where((expert == e)[:, None], result, 0) for e, result in enumerate(results))


def train(layer, steps=20, rate=3.0):
    """The losses of some steps of gradient descent."""
    step = jax.jit(jax.value_and_grad(lambda both: jnp.mean((layer(*both) - target) ** 2)))
    losses, now = [], weights
    for _ in range(steps):
        loss, gradients = step(now)
        losses.append(float(loss))
        now = tuple(w - rate * g for w, g in zip(now, gradients, strict=True))
    return losses


ours, wanted = train(by_ragged_dots), train(by_loop)
print(f"{jax.default_backend()}: ragged dots {ours[0]:.4f} -> {ours[-1]:.4f}, loop {wanted[0]:.4f} -> {wanted[-1]:.4f}")
if max(abs(a - b) for a, b in zip(ours, wanted, strict=True)) > 1e-2 * wanted[0] or ours[-1] > 0.9 * ours[0]:
    raise SystemExit("the losses differ, or do not go down")
