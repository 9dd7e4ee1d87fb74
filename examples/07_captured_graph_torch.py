"""A training step of ragged dots in a CUDA graph: replays read new tokens and new sizes. On a CPU the steps run without a graph."""

import torch

from hipgroupgemm.integrations.torch import ragged_dot

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
TOKENS, HIDDEN, EXPERTS = 512, 64, 4
torch.manual_seed(0)
x = torch.zeros(TOKENS, HIDDEN, device=device)
sizes = torch.full((EXPERTS,), TOKENS // EXPERTS, device=device)  # what the router decides; it stays on the device
weights = (torch.randn(EXPERTS, HIDDEN, HIDDEN, device=device) / HIDDEN**0.5).requires_grad_()
weights.grad = torch.zeros_like(weights)  # a graph writes where it wrote when it was captured


def step() -> torch.Tensor:
    """Forward, backward and update; the loss."""
    weights.grad.zero_()
    loss = ragged_dot(x, weights, sizes).square().mean()
    loss.backward()
    with torch.no_grad():
        weights.sub_(weights.grad, alpha=10.0)
    return loss.detach()


run = step
if on_gpu:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # once before the capture: what compiles and allocates
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    run = lambda: (graph.replay(), captured)[1]  # noqa: E731

for counts in ([128, 128, 128, 128], [500, 0, 12, 0], [0, 0, 0, 512]):
    x.normal_()
    sizes.copy_(torch.tensor(counts))
    before = weights.detach().clone()
    loss = float(run())
    rows = torch.repeat_interleave(torch.arange(EXPERTS, device=device), sizes)
    wanted = float(torch.einsum("mk,mkn->mn", x, before[rows]).square().mean())
    moved = [bool((weights[e] != before[e]).any()) for e in range(EXPERTS)]
    print(f"{device}: sizes {counts}, loss {loss:.5f}, wanted {wanted:.5f}, experts trained {moved}")
    if abs(loss - wanted) > 1e-4 * wanted or moved != [count > 0 for count in counts]:
        raise SystemExit("the loss is wrong")
