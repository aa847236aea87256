"""The fixed-depth baseline: every token goes through every block in every execution mode."""

from torch import Tensor, nn

from tokendepth.config import DenseConfig, ModelConfig
from tokendepth.context import Context
from tokendepth.methods.base import Method, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import Site


class Dense(Method):
    has_soft = False

    def __init__(self, model: ModelConfig, config: DenseConfig) -> None:
        super().__init__(model, config)
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.n_layer))

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        for block in self.blocks:
            hidden = block(hidden, ctx)
        return MethodOutput(hidden, self.traced([everyone(hidden)] * len(self.blocks), ctx), {})

    def sites(self, keys: int) -> tuple[Site, ...]:
        return tuple(block.site(f"block {n}", keys, routed=False) for n, block in enumerate(blocks_of(self.blocks)))
