"""Switch Transformer (Fedus et al. 2022): every other block routes each token to one of several feed-forward networks.

    p(x) = softmax(W_r x),   i = argmax p(x),   y = p_i(x) E_i(x)                                            (eq. 1, 2)

The router works in float32 and, in training, on an input jittered by a factor in 1 +- `jitter`. An expert has room for
capacity = capacity_factor * tokens / experts (eq. 3), first come first served; a token beyond that gets no feed-forward
network at all, only its residual. There are two losses: balance, experts * sum_i f_i P_i with f_i the share of tokens
sent to expert i and P_i its mean probability (eq. 4 to 6), and z, the mean of logsumexp(logits)^2. The paper sums the
losses over its switched blocks. Here each is their mean, so that a weight means the same at any depth: with n switched
blocks, 1/n of the paper's.

The tokens over which capacity is counted are up to the implementer. Here every sequence is its own group, with as many
tokens as the model's whole context. The paper's groups span a batch; a token's result would then depend on the other
sequences in the batch, and on the final length of the text. So training and evaluation have the same rule, and it is
causal: whether there is room depends on earlier tokens. With a `capacity_factor` of at least `experts`, no token is
dropped.

All experts cost the same, so the choice of an expert is not a choice of depth. Only overflow is: the site of a switched
block is its feed-forward network, and a dropped token is not processed there. Attention and router run for every token.
Hard execution computes the expert for every token, including those that are then dropped.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SwitchConfig
from tokendepth.context import Context
from tokendepth.layers.ffn import FeedForward, GatedFeedForward, make_ffn
from tokendepth.layers.routers import LinearRouter
from tokendepth.methods.base import Method, balance_and_z, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import Site


class SwitchBlock(Block):
    """A block whose feed-forward network is one of several."""

    def __init__(self, model: ModelConfig, layer: int, config: SwitchConfig) -> None:
        super().__init__(model, layer)
        del self.ffn
        self.layer, self.knobs = layer, config
        self.capacity = math.ceil(config.capacity_factor * model.context / config.experts)
        self.router = LinearRouter(model.d_model, config.experts)
        self.experts = nn.ModuleList(make_ffn(model) for _ in range(config.experts))

    def kernel_weights(self) -> None:
        return None

    @property
    def expert_flops(self) -> float:
        """Per token; the same for all experts."""
        network = self.experts[0]
        assert isinstance(network, (FeedForward, GatedFeedForward))
        return network.flops

    def attend(self, h: Tensor, ctx: Context) -> Tensor:
        return h + self.dropout(self.attention(self.norm_attention(h), ctx))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[batch, time, expert]`, the expert of each token, and its probability (eq. 1)."""
        if self.training and self.knobs.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.knobs.jitter, 1 + self.knobs.jitter)
        logits = self.router(x)
        probability, expert = logits.softmax(-1).max(-1)
        return logits, expert, probability

    def queue(self, expert: Tensor, ctx: Context) -> Tensor:
        """`[batch, time]`: how many tokens of the sequence have chosen the same expert so far, including this one."""
        wanted = F.one_hot(expert, self.knobs.experts)
        if ctx.valid is not None:
            wanted = wanted * ctx.valid[..., None]
        ahead = wanted.cumsum(1)
        if ctx.cache is not None:
            ahead = ahead + ctx.state(self.layer, like=ahead[0, 0])[:, None]
            ctx.remember(self.layer, ahead)
        return ahead.gather(2, expert[..., None])[..., 0]

    def ask(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Each of `rows` `[n, d]` through its own expert only."""
        out = torch.empty_like(rows)
        for number, network in enumerate(self.experts):
            mine = expert == number
            out[mine] = network(rows[mine]).to(out.dtype)
        return out

    def ask_in_slots(self, x: Tensor, expert: Tensor, place: Tensor, active: Tensor) -> Tensor:
        """As `ask`, with fixed shapes: each expert has `capacity` slots per sequence; inactive tokens get zeros."""
        dropped = self.knobs.experts * self.capacity  # an extra slot after all others
        slot = torch.where(active, expert * self.capacity + place - 1, dropped)
        slot = slot[..., None].expand_as(x)
        slots = x.new_zeros(len(x), dropped + 1, x.shape[-1]).scatter(1, slot, x)
        inputs = slots[:, :-1].unflatten(1, (self.knobs.experts, -1)).unbind(1)
        outputs = [network(mine) for network, mine in zip(self.experts, inputs, strict=True)]
        return F.pad(torch.cat(outputs, 1), (0, 0, 0, 1)).gather(1, slot)


class Switch(Method):
    has_soft = False
    decides_by_threshold = False
    batch_statistic = "the balance of its tokens over the experts"

    def __init__(self, model: ModelConfig, config: SwitchConfig) -> None:
        super().__init__(model, config)
        self.knobs = config
        self.blocks = nn.ModuleList(
            SwitchBlock(model, layer, config) if layer % config.every == config.every - 1 else Block(model, layer)
            for layer in range(model.n_layer)
        )

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        given = iter(()) if ctx.decisions is None else iter(ctx.decisions)
        work, losses = [], []
        for block in self.blocks:
            if not isinstance(block, SwitchBlock):
                hidden = block(hidden, ctx)
                work.append(everyone(hidden))
                continue
            hidden = block.attend(hidden, ctx)
            x = block.norm_ffn(hidden)
            logits, expert, probability = block.route(x)
            place = block.queue(expert, ctx)
            active = place <= block.capacity
            if self.training:
                active = ctx.real(active)
                update = block.ask_in_slots(x, expert, place, active)
                hidden = hidden + block.dropout(probability[..., None] * update).to(hidden.dtype)
                losses.append(torch.stack(balance_and_z(logits, expert, ctx)))
            else:
                active = ctx.real(next(given, active))
                hidden = self._execute(block, hidden, x, ctx, active, expert, probability)
            work.append(active)
        trace = self.traced(work, ctx)
        if not losses:
            return MethodOutput(hidden, trace, {})
        balance, z = torch.stack(losses).mean(0)
        return MethodOutput(hidden, trace, {"balance": self.knobs.balance_loss * balance, "z": self.knobs.z_loss * z})

    def _execute(
        self,
        block: SwitchBlock,
        hidden: Tensor,
        x: Tensor,
        ctx: Context,
        active: Tensor,
        expert: Tensor,
        weight: Tensor,
    ) -> Tensor:
        computed = active if ctx.execution == "sparse" else torch.ones_like(active)
        update = block.ask(x[computed], expert[computed])
        rows = hidden[computed] + (weight[computed][:, None] * update).to(hidden.dtype)
        return torch.where(active[..., None], hidden.masked_scatter(computed[..., None], rows), hidden)

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for n, block in enumerate(blocks_of(self.blocks)):
            if isinstance(block, SwitchBlock):
                network = block.expert_flops
                always = block.attention.kv_flops + block.attention.row_flops(keys)
                sites.append(Site(f"experts {n}", True, always, network, block.router.flops))
            else:
                sites.append(block.site(f"block {n}", keys, routed=False))
        return tuple(sites)

    def routers(self) -> list[nn.Module]:
        return [block.router for block in self.blocks if isinstance(block, SwitchBlock)]
