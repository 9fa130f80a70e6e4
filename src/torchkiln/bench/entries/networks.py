"""Small networks, where the overhead of a call rules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchkiln.bench.entries.entry import Entry, Inputs
from torchkiln.demo import Transformer


class LstmLoop(nn.Module):
    """An LSTM cell stepped by a Python loop over a short sequence."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), x.size(2)), x.new_zeros(x.size(0), x.size(2))
        for step in range(8):
            state = self.cell(x[:, step], state)
        result: Tensor = self.head(state[0])
        return result


class ActorCritic(nn.Module):
    """A policy and a value of one observation, as an agent asks for them at each step."""

    def __init__(self, observation: int = 17, width: int = 64, actions: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(observation)
        logits = self.policy(hidden).log_softmax(-1)
        entropy = -(logits.exp() * logits).sum(-1)
        return logits, self.value(hidden).squeeze(-1), entropy


def _mlp() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _mlp_inputs(variant: int) -> Inputs:
    return {"input": torch.randn((32, 24)[variant], 64)}


def _lstm_inputs(variant: int) -> Inputs:
    return {"x": torch.randn((4, 3)[variant], 8, 64)}


def _transformer_inputs(variant: int) -> Inputs:
    return {"ids": torch.randint(1000, ((4, 3)[variant], 64))}


def _observation(variant: int) -> Inputs:
    return {"observation": torch.randn((1, 2)[variant], 17)}


NETWORKS = (
    Entry("mlp-64", "small", _mlp, _mlp_inputs),
    Entry("lstm-loop", "small", LstmLoop, _lstm_inputs),
    Entry("tiny-transformer", "small", Transformer, _transformer_inputs),
    Entry("actor-critic", "small", ActorCritic, _observation),
)
