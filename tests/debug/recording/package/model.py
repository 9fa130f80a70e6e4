"""The model: a loop over layers of another file, and a function of a third."""

from torch import Tensor, nn

from tests.debug.recording.package.parts.activation import bounded
from tests.debug.recording.package.parts.layer import Layer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # call of a layer
        x = bounded(x)  # call of bounded
        return self.head(x).softmax(-1)  # head
