"""Switch Transformer (Fedus et al. 2022): every other feed-forward network is several, of which each token takes one.

    p(x) = softmax(W_r x),   i = argmax p(x),   y = p_i(x) E_i(x)                                            (eq. 1, 2)

The router works in float32 and, while training, on an input jittered by a factor in 1 +- `jitter`. An expert has room
for capacity = capacity_factor * tokens / experts (eq. 3), first come first served; a token beyond that gets no
feed-forward network at all, only its residual. There are two losses: balance, experts * sum_i f_i P_i with f_i the
share of tokens sent to expert i and P_i its mean probability (eq. 4 to 6), and z, the mean of logsumexp(logits)^2.

Whose tokens are counted is open to the implementer. Here every sequence is a group of its own, and its tokens are those
of the model's whole context. The paper's groups span a batch; then a token's result would depend on its neighbours in
the batch, and on how long the text will become. So one rule serves training and evaluation, and it is causal: whether
there is room depends on the tokens before. A `capacity_factor` as large as `experts` drops nothing.

All experts cost the same, so which one a token takes is no depth. The one depth decision is the overflow: the site of a
switched block is its feed-forward network, and a token that found no room was not worked on there. Attention and router
run for every token. Hard execution computes the expert of every token, also of those that are then dropped.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SwitchConfig
from tokendepth.methods.base import Method
from tokendepth.methods.mod import LinearRouter
from tokendepth.model import Block, FeedForward, Pass, Spent, block_site
from tokendepth.trace import DepthTrace, Site


class SwitchBlock(Block):
    """A block whose feed-forward network is one of several."""

    def __init__(self, model: ModelConfig, layer: int, config: SwitchConfig) -> None:
        super().__init__(model, layer)
        del self.ffn
        self.layer, self.knobs = layer, config
        self.capacity = math.ceil(config.capacity_factor * model.context / config.experts)
        self.router = LinearRouter(model.d_model, config.experts)
        self.experts = nn.ModuleList(FeedForward(model) for _ in range(config.experts))

    def attend(self, h: Tensor, run: Pass) -> Tensor:
        return h + self.dropout(self.attention(self.norm_attention(h), run))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[batch, time, expert]`, the expert of each token, and its probability (eq. 1)."""
        if self.training and self.knobs.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.knobs.jitter, 1 + self.knobs.jitter)
        logits = self.router(x)
        probability, expert = logits.softmax(-1).max(-1)
        return logits, expert, probability

    def queue(self, expert: Tensor, run: Pass) -> Tensor:
        """`[batch, time]`: how many tokens of its sequence wanted the same expert up to this one, itself included."""
        wanted = F.one_hot(expert, self.knobs.experts)
        if run.valid is not None:
            wanted = wanted * run.valid[..., None]
        ahead = wanted.cumsum(1)
        if run.cache is not None:
            ahead = ahead + run.cache.own.get(self.layer, 0)
            run.cache.own[self.layer] = ahead[:, -1:]
        return ahead.gather(2, expert[..., None])[..., 0]

    def ask(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Each of `rows` `[n, d]` through its expert and no other."""
        out = torch.empty_like(rows)
        for number, network in enumerate(self.experts):
            mine = expert == number
            out[mine] = network(rows[mine]).to(out.dtype)
        return out

    def ask_in_slots(self, x: Tensor, expert: Tensor, place: Tensor) -> Tensor:
        """As `ask`, in fixed shapes: each expert has `capacity` slots a sequence, and who finds none gets zeros."""
        dropped = self.knobs.experts * self.capacity  # one slot behind all others
        slot = torch.where(place <= self.capacity, expert * self.capacity + place - 1, dropped)
        slot = slot[..., None].expand_as(x)
        slots = x.new_zeros(len(x), dropped + 1, x.shape[-1]).scatter(1, slot, x)
        inputs = slots[:, :-1].unflatten(1, (self.knobs.experts, -1)).unbind(1)
        outputs = [network(mine) for network, mine in zip(self.experts, inputs, strict=True)]
        return F.pad(torch.cat(outputs, 1), (0, 0, 0, 1)).gather(1, slot)


class Switch(Method):
    has_soft = False
    decides_by_threshold = False

    def __init__(self, model: ModelConfig, config: SwitchConfig) -> None:
        super().__init__(model, config)
        self.knobs = config
        self.blocks = nn.ModuleList(
            SwitchBlock(model, layer, config) if layer % config.every == config.every - 1 else Block(model, layer)
            for layer in range(model.n_layer)
        )

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        given = iter(()) if run.decisions is None else iter(run.decisions)
        work, losses = [], []
        for block in self.blocks:
            if not isinstance(block, SwitchBlock):
                hidden = block(hidden, run)
                work.append(torch.ones(hidden.shape[:2], device=hidden.device))
                continue
            hidden = block.attend(hidden, run)
            x = block.norm_ffn(hidden)
            logits, expert, probability = block.route(x)
            place = block.queue(expert, run)
            active = place <= block.capacity
            if self.training:
                update = block.ask_in_slots(x, expert, place)
                hidden = hidden + block.dropout(probability[..., None] * update)
                losses.append(self._losses(logits, expert))
            else:
                active = next(given, active)
                active = active if run.valid is None else active & run.valid
                hidden = self._execute(block, hidden, x, run, active, expert, probability)
            work.append(active.float())
        trace = DepthTrace(torch.stack(work), sites, run.execution)
        if not losses:
            return Spent(hidden, trace, {})
        balance, z = torch.stack(losses).mean(0)
        return Spent(hidden, trace, {"balance": self.knobs.balance_loss * balance, "z": self.knobs.z_loss * z})

    def _execute(
        self, block: SwitchBlock, hidden: Tensor, x: Tensor, run: Pass, active: Tensor, expert: Tensor, weight: Tensor
    ) -> Tensor:
        computed = active if run.execution == "sparse" else torch.ones_like(active)
        rows = hidden[computed] + weight[computed][:, None] * block.ask(x[computed], expert[computed])
        return torch.where(active[..., None], hidden.masked_scatter(computed[..., None], rows), hidden)

    def _losses(self, logits: Tensor, expert: Tensor) -> Tensor:
        """`[balance, z]` of one block."""
        share = F.one_hot(expert, self.knobs.experts).float().mean((0, 1))
        balance = self.knobs.experts * (share * logits.softmax(-1).mean((0, 1))).sum()
        return torch.stack([balance, logits.logsumexp(-1).square().mean()])

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for n, block in enumerate(self.blocks):
            site = block_site(self.model, f"block {n}", keys, routed=False)
            if isinstance(block, SwitchBlock):
                network = 4 * self.model.d_model * self.model.d_ff
                site = Site(f"experts {n}", True, site.always + site.active - network, network, block.router.flops)
            sites.append(site)
        return tuple(sites)

    def routers(self) -> list[nn.Module]:
        return [block.router for block in self.blocks if isinstance(block, SwitchBlock)]
