"""The fixed-depth baseline: every token passes every block, whatever the execution is called."""

import torch
from torch import Tensor, nn

from tokendepth.config import DenseConfig, ModelConfig
from tokendepth.methods.base import Method
from tokendepth.model import Block, Pass, Spent, block_site
from tokendepth.trace import DepthTrace, Site


class Dense(Method):
    has_soft = False

    def __init__(self, model: ModelConfig, config: DenseConfig) -> None:
        super().__init__(model, config)
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.n_layer))

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        for block in self.blocks:
            assert isinstance(block, Block)
            hidden = block.forward_all(hidden, run)
        work = torch.ones(len(sites), *hidden.shape[:2], device=hidden.device)
        return Spent(hidden, DepthTrace(work, sites, run.execution), {})

    def sites(self, keys: int) -> tuple[Site, ...]:
        return tuple(block_site(self.model, f"block {n}", keys, routed=False) for n in range(len(self.blocks)))
