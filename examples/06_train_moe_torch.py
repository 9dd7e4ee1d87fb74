"""Training a mixture-of-experts layer in torch: its loss is that of a loop over experts, and nothing waits for the sizes on the device."""

import torch

from hipgroupgemm.integrations.torch import ragged_dot

device = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, STEPS = 256, 64, 128, 8, 2, 10


class MoE(torch.nn.Module):
    """A router and experts of two matrices, by ragged dots or by a loop."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop = loop
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / HIDDEN**0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K)
        if self.loop:  # what the ragged dots replace
            out = torch.zeros_like(x)
            for expert in range(EXPERTS):
                token, place = torch.where(chosen == expert)
                y = torch.relu(x[token] @ self.up[expert]) @ self.down[expert]
                out = out.index_add(0, token, y * weights[token, place, None])
            return out
        expert, order = chosen.flatten().sort()  # rows in expert order
        ends = torch.searchsorted(expert, torch.arange(EXPERTS, device=x.device), right=True)
        rows = torch.relu(ragged_dot(x[order // TOP_K], self.up, offs=ends))
        rows = ragged_dot(rows, self.down, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP_K, rows)


losses = []
for loop in (False, True):
    torch.manual_seed(0)
    layer, x, wanted = MoE(loop).to(device), torch.randn(TOKENS, HIDDEN, device=device), torch.randn(TOKENS, HIDDEN, device=device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(f"{device}: ragged dots {losses[0]:.5f} -> {losses[STEPS - 1]:.5f}, loop {losses[STEPS]:.5f} -> {losses[-1]:.5f}")
if not all(abs(a - b) < 1e-3 * b for a, b in zip(losses[:STEPS], losses[STEPS:], strict=True)) or losses[-1] > 0.9 * losses[0]:
    raise SystemExit("the losses differ")
