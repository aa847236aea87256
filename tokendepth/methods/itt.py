"""Inner Thinking Transformer (Chen et al. 2025): every other layer is applied repeatedly to the tokens that need it.

    Y(0) = f(x);    at thinking step t:   w = R_t(Y(t-1)),
    Y'(t) = alpha_t w f(Y(t-1))  for the tokens of highest w, a share `capacity` of the sequence;  else Y'(t) = Y(t-1)
    Y(t) = Y(0) * phi_0 + sum_{i<=t} Y'(i) * phi_i                               (residual thinking connection)

f is the layer itself, phi_t in R^d the learned encoding of step t, alpha_t a learned number, and R_t a linear router,
one for each step. `steps` counts all applications, including the first: the paper's "x4" costs as much as four.

Left open by the sources and decided here: the percentile is taken over the whole sequence, and no rule is given for
decoding or for keys and values; both are taken from Mixture-of-Depths. In evaluation a token thinks if a logit is above
0: that of a predictor trained on the side (then the task loss is the only one that reaches the model, as in the paper),
or the router's own. At a thinking step the selected tokens attend to each other, and only they have keys and values
there. Initially phi_0 is 1, the other phi are 0.1, so that thinking starts as a correction; alpha is 1.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ITTConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.methods.base import Method, blocks_of, everyone
from tokendepth.methods.mod import Selector, among_site, decision_loss, top_k
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import Site


class ThinkingBlock(Block):
    """A block with the routers and parameters of its thinking steps."""

    def __init__(self, model: ModelConfig, layer: int, config: ITTConfig) -> None:
        super().__init__(model, layer)
        thoughts = config.steps - 1
        self.selectors = nn.ModuleList(Selector(model.d_model, config.decides) for _ in range(thoughts))
        self.alpha = nn.Parameter(torch.ones(thoughts))
        self.phi = nn.ParameterList(torch.full((model.d_model,), 0.1 if step else 1.0) for step in range(config.steps))


class ITT(Method):
    has_soft = False
    skips_on_device = True

    def __init__(self, model: ModelConfig, config: ITTConfig) -> None:
        super().__init__(model, config)
        self.steps, self.capacity, self.decision_loss = config.steps, config.capacity, config.decision_loss
        blocks, layer = [], 0
        for n in range(model.n_layer):  # one cache layer per application
            thinks = n % config.every == config.every - 1
            blocks.append(ThinkingBlock(model, layer, config) if thinks else Block(model, layer))
            layer += config.steps if thinks else 1
        self.blocks, self._cache_layers = nn.ModuleList(blocks), layer

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        thresholds = iter(ctx.thresholds([0.0] * len(self.routers())))
        work, losses = [], []
        for block in self.blocks:
            hidden = block(hidden, ctx)
            work.append(everyone(hidden))
            if not isinstance(block, ThinkingBlock):
                continue
            total = hidden * block.phi[0]
            for step, selector in enumerate(block.selectors, 1):
                weight, logit = selector(hidden)
                scale = block.alpha[step - 1] * weight[..., None]
                if self.training:
                    chosen = top_k(weight, self.capacity, ctx)
                    active = chosen.as_mask(logit)
                    losses.append(decision_loss(logit, active, ctx))
                    rows = chosen.take(hidden)
                    thought = chosen.add(hidden, chosen.take(scale) * block(rows, chosen.context(ctx)) - rows)
                else:
                    active = ctx.real(logit > next(thresholds))
                    own = replace(ctx, layer=block.attention.layer + step)
                    thought = block(ctx.spare(hidden), own, Rows(active), keys="active")
                    thought = torch.where(active[..., None], (scale * thought).to(hidden.dtype), hidden)
                total = total + thought * block.phi[step]
                hidden = total
                work.append(active)
        losses = {"decision": self.decision_loss * torch.stack(losses).mean()} if losses else {}
        return MethodOutput(hidden, self.traced(work, ctx), losses)

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for n, block in enumerate(blocks_of(self.blocks)):
            sites.append(block.site(f"block {n}", keys, routed=False))
            for step, selector in enumerate(self._selectors(block), 1):
                sites.append(among_site(block, f"block {n} step {step}", keys, router=selector.flops))
        return tuple(sites)

    @property
    def cache_layers(self) -> int:
        return self._cache_layers

    def routers(self) -> list[nn.Module]:
        return [selector.decider for block in self.blocks for selector in self._selectors(block)]

    def _selectors(self, block: nn.Module) -> list[Selector]:
        found = block.selectors if isinstance(block, ThinkingBlock) else []
        return [selector for selector in found if isinstance(selector, Selector)]
