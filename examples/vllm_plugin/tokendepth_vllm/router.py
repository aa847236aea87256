"""Which tokens a layer processes; does not need vLLM."""

from torch import Tensor, nn


class Router(nn.Module):
    """The Token-Selective Attention router, with the weights written by `convert.py`."""

    def __init__(self, width: int, hidden: int, threshold_logit: float) -> None:
        super().__init__()
        self.hidden, self.logit = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.threshold_logit = threshold_logit

    def forward(self, states: Tensor) -> Tensor:
        """`[tokens, width] -> [tokens]`: True for those that do not halt."""
        return self.logit(self.hidden(states).relu()).squeeze(-1) <= self.threshold_logit
