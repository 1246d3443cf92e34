"""A small language model, and the gradients of all ranks in one pass.

The model predicts the partner of a token: an embedding, perhaps a mixture of experts with top-1
routing, and a linear head. Its loss depends on the token alone, so one pass over the distinct
tokens of a step serves all ranks. The gradient of a token is a sum of outer products. The gradient
of a rank is the sum over tokens, weighted by the rank's counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTH = 32
"""Width of the embedding."""
HIDDEN = 64
"""Width of the hidden layer of an expert."""
CHUNK = 1024
"""Number of tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class OuterProducts:
    """The gradients of one parameter: for each token, the outer product of two vectors.

    Attributes:
        name: name of the parameter.
        expert: index of the expert in the parameter, or None for the whole parameter.
        positions: positions of the tokens in the pass, or None for all tokens.
        left: gradients with respect to the outputs of the parameter.
        right: inputs of the parameter.
    """

    name: str
    expert: int | None
    positions: torch.Tensor | None
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class PassResults:
    """The results of one forward and backward pass over distinct tokens.

    Attributes:
        losses: loss of each token.
        slopes: gradient of each token's loss with respect to its embedding as an input.
        products: gradients of the other parameters; the embedding is among them if it is tied.
    """

    losses: torch.Tensor
    slopes: torch.Tensor
    products: list[OuterProducts]


class TokenModel:
    """The model, as views of one flat vector of parameters.

    A tied head has the weights of the embedding. A square matrix is then between the two, because
    the logits would otherwise be symmetric in input and output.

    Args:
        targets: the token to predict for each token.
        tied: whether the head has the weights of the embedding.
        experts: number of experts, 0 for none.
        seed: seed of the initial parameters.
    """

    def __init__(self, targets: torch.Tensor, *, tied: bool, experts: int, seed: int) -> None:
        self.targets = targets
        self.tied = tied
        self.experts = experts
        vocabulary = len(targets)
        self.shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, WIDTH)}
        if experts:
            self.shapes["router"] = (experts, WIDTH)
            self.shapes["up"] = (experts, HIDDEN, WIDTH)
            self.shapes["down"] = (experts, WIDTH, HIDDEN)
        self.shapes["middle" if tied else "head"] = (WIDTH if tied else vocabulary, WIDTH)
        random = torch.Generator().manual_seed(seed)
        parts = {name: torch.randn(s, generator=random) for name, s in self.shapes.items()}
        # Entries of the embedding have size 1; weights keep the size of their input.
        sizes = {
            name: 1.0 if name == "embedding" and not tied else shape[-1] ** 0.5
            for name, shape in self.shapes.items()
        }
        self.parameters = torch.cat([p.flatten() / sizes[name] for name, p in parts.items()])
        self.views = self.split(self.parameters)
        self._kept: dict[str, torch.Tensor] = {}

    def _memory(self, name: str, rows: int) -> torch.Tensor:
        """Return memory for so many rows of logits; the next call with this name reuses it."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < rows:
            kept = self._kept[name] = torch.empty(rows, len(self.targets))
        return kept[:rows]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of a flat vector in the shapes of the parameters."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = torch.split_with_sizes(flat, sizes)
        return {n: part.view(s) for (n, s), part in zip(self.shapes.items(), parts, strict=True)}

    def losses(self) -> torch.Tensor:
        """Return the loss of every token of the vocabulary."""
        every = torch.arange(len(self.targets))
        return torch.cat(
            [self.run(tokens).losses for tokens in every.chunk(-(-len(every) // CHUNK))]
        )

    def run(self, tokens: torch.Tensor) -> PassResults:
        """Run the model forward and backward on distinct tokens."""
        parameters = self.views
        inputs = parameters["embedding"][tokens]
        experts = _Experts(parameters, inputs) if self.experts else None
        mixed = inputs if experts is None else inputs + experts.outputs
        outputs = mixed @ parameters["middle"].T if self.tied else mixed
        head = "embedding" if self.tied else "head"
        # In place and in memory that is kept: most of the time is spent on this matrix.
        errors = self._memory("errors", len(tokens))
        torch.mm(outputs, parameters[head].T, out=errors)
        errors -= errors.amax(1, keepdim=True)
        right = (torch.arange(len(tokens)), self.targets[tokens])
        losses = -errors[right]
        totals = errors.exp_().sum(1, keepdim=True)
        losses += totals[:, 0].log()
        errors /= totals
        errors[right] -= 1

        products = [OuterProducts(head, None, None, errors, outputs)]
        slopes = errors @ parameters[head]
        if self.tied:
            products.append(OuterProducts("middle", None, None, slopes, mixed))
            slopes = slopes @ parameters["middle"]
        if experts is not None:
            more, through = experts.backward(slopes)
            products += more
            slopes = slopes + through
        return PassResults(losses, slopes, products)

    def gradients(self, tokens: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
        """Write each rank's gradient into its row.

        Args:
            tokens: the distinct tokens of the step.
            weights: weight of each token in the loss of each rank, (ranks, tokens).
            rows: the matrix to fill, (ranks, parameters).
        """
        done = self.run(tokens)
        rows.zero_()
        for row, weight in zip(rows, weights, strict=True):
            views = self.split(row)
            for each in done.products:
                used = weight if each.positions is None else weight[each.positions]
                seen = used.nonzero()[:, 0]
                into = views[each.name] if each.expert is None else views[each.name][each.expert]
                left = self._memory("seen", len(seen)) if each.left.shape[1] > HIDDEN else None
                left = torch.index_select(each.left, 0, seen, out=left)
                torch.mm(left.T, each.right[seen] * used[seen, None], out=into)
            seen = weight.nonzero()[:, 0]
            slopes = done.slopes[seen] * weight[seen, None]
            views["embedding"].index_add_(0, tokens[seen], slopes)


class _Experts:
    """A forward pass through the experts: each token has the one that its router prefers.

    The output is that of the expert, multiplied by the router's probability, as in the switch
    transformer.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], inputs: torch.Tensor) -> None:
        self.parameters = parameters
        self.inputs = inputs
        self.shares = (inputs @ parameters["router"].T).softmax(1)
        self.gates, chosen = self.shares.max(1)
        self.groups = [(chosen == k).nonzero()[:, 0] for k in range(self.shares.shape[1])]
        self.hidden = torch.zeros(len(inputs), HIDDEN)
        self.plain = torch.zeros_like(inputs)
        for k, group in enumerate(self.groups):
            self.hidden[group] = (inputs[group] @ parameters["up"][k].T).relu()
            self.plain[group] = self.hidden[group] @ parameters["down"][k].T
        self.outputs = self.plain * self.gates[:, None]

    def backward(self, slopes: torch.Tensor) -> tuple[list[OuterProducts], torch.Tensor]:
        """Return the gradients of router and experts, and those of the inputs."""
        change = -self.shares * ((slopes * self.plain).sum(1) * self.gates)[:, None]
        for k, group in enumerate(self.groups):
            change[group, k] += (slopes[group] * self.plain[group]).sum(1) * self.gates[group]
        products = [OuterProducts("router", None, None, change, self.inputs)]
        back = change @ self.parameters["router"]
        for k, group in enumerate(self.groups):
            out = slopes[group] * self.gates[group, None]
            inner = (out @ self.parameters["down"][k]) * (self.hidden[group] > 0)
            products.append(OuterProducts("down", k, group, out, self.hidden[group]))
            products.append(OuterProducts("up", k, group, inner, self.inputs[group]))
            back[group] += inner @ self.parameters["up"][k]
        return products, back
