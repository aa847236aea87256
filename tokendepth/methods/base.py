"""What every method is: it owns its blocks and routers and says how depth is spent."""

from collections.abc import Sequence

from torch import Tensor, nn

from tokendepth.config import MethodConfig, ModelConfig
from tokendepth.model import Pass, Spent
from tokendepth.trace import Site


class Method(nn.Module):
    """Hidden states and a `Pass` in; hidden states, a `DepthTrace` and auxiliary losses out.

    The promises that the contract suite checks for every method: causal in evaluation; cached decoding equals the full
    forward and padding changes nothing; sparse equals hard; every parameter is trained; the trace's FLOPs are those
    executed; saved and loaded it computes the same; the same seed gives the same weights.
    """

    has_soft = True
    """Whether soft execution weighs what hard execution skips; else soft is hard, and has no figures of its own."""

    decides_by_threshold = True
    """Whether every decision is a score above a threshold, so that thresholds can be given to a pass."""
    skips_on_device = False
    """Whether sparse execution asks nothing of the host where kernels serve."""

    def __init__(self, model: ModelConfig, config: MethodConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        raise NotImplementedError

    def sites(self, keys: int) -> tuple[Site, ...]:
        """Where this method can spend depth, and the cost there when attention rows are `keys` wide."""
        raise NotImplementedError

    @property
    def cache_layers(self) -> int:
        """How many sets of keys and values a `KVCache` for this method has to hold."""
        return self.model.n_layer

    def live_thresholds(self) -> Tensor | None:
        """`[routed site]`: those that may be set after the model was compiled."""
        return None

    def routers(self) -> Sequence[nn.Module]:
        """The modules that decide; none for a fixed depth."""
        return []
