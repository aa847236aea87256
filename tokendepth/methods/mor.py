"""Mixture-of-Recursions (Bae et al. 2025): some layers are applied repeatedly, to fewer and fewer tokens.

Middle-cycle sharing: the first and the last layer are unique, and the layers between them are one shared block Phi that
is applied `recursions` times. The model's number of layers counts applications, so that costs at full depth are
comparable. A token's number of recursions is chosen in one of two ways:

`expert`: each recursion r has a router, g = alpha * sigmoid(theta_r^T H), and takes the tokens with the highest g,

    H <- H + g Phi(H)  if the token is chosen, else H;        capacities N/N, (N-1)/N, ..., 1/N of all tokens

and only tokens that were chosen before (hierarchical filtering). Top-k over a sequence sees the future, so it is used
in training only. There, a binary cross-entropy with "was chosen" as the target teaches each later router to make the
same decision from the token alone. In evaluation a token chosen so far is chosen again if its logit is above 0
(probability 0.5).

`token`: one router at the entry, with a softmax over the recursions. The most likely depth i is the token's, with
probability g. The token goes through Phi i times, and after the last H <- H^1 + g Phi(H), where H^1 is the state at the
entry. A balance loss, N * sum_i f_i P_i, and a z-loss, mean logsumexp^2, keep all depths in use. This is causal.

Phi(H) is the block's whole output, including its inner residual, as in the authors' code. `kv` is what later recursions
attend to. `recursion`: only the tokens that are active at that depth. `shared`: every token's keys and values from the
first recursion, so that later ones compute only queries. The first recursion takes every token.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, MoRConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.attention import Keys
from tokendepth.layers.routers import LinearRouter
from tokendepth.methods.base import Method, balance_and_z, blocks_of, everyone
from tokendepth.methods.mod import Selected, decision_loss, top_k
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import Site


class MoR(Method):
    has_soft = False
    decides_by_threshold = False
    skips_on_device = True

    def __init__(self, model: ModelConfig, config: MoRConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.recursions = config, config.recursions
        self.by_token, self.shares_keys = config.routing == "token", config.kv == "shared"
        if self.by_token:
            self.batch_statistic = "the balance of its tokens over the depths"
        depth = (model.n_layer - 2) // self.recursions
        self.first = Block(model, 0)
        self.shared = nn.ModuleList(Block(model, 1 + layer) for layer in range(depth))
        self.last = Block(model, self.cache_layers - 1)
        if self.by_token:
            routers = [LinearRouter(model.d_model, self.recursions)]
        else:
            routers = [LinearRouter(model.d_model) for _ in range(self.recursions)]
        for router in routers:
            nn.init.normal_(router.weight, std=0.02)
        self.recursion_routers = nn.ModuleList(routers)

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        hidden = self.first(hidden, ctx)
        if self.by_token:
            hidden, work, losses = self._token_choice(hidden, ctx)
        elif self.training:
            hidden, work, losses = self._train_expert_choice(hidden, ctx)
        else:
            hidden, work, losses = self._expert_choice(hidden, ctx)
        hidden = self.last(hidden, ctx)
        return MethodOutput(hidden, self.traced([everyone(hidden), *work, everyone(hidden)], ctx), losses)

    # -- expert choice

    def _expert_choice(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """In evaluation: each router decides for each token alone."""
        active = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        kept: list[Keys] = []
        work = []
        for recursion, router in enumerate(self.recursion_routers):
            logit = router(hidden)
            if recursion:
                active = active & (logit > 0) if ctx.decisions is None else ctx.decisions[recursion - 1]
                active = ctx.real(active)
            recurred = self._recur(recursion, hidden, ctx, active, kept)
            hidden = gated_add(hidden, recurred, gate=self.knobs.alpha * torch.sigmoid(logit) * active)
            work.append(active)
        return hidden, work, {}

    def _train_expert_choice(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Top-k of the tokens still in; only they are computed."""
        batch, time = hidden.shape[:2]
        still_in = Selected(torch.arange(time, device=hidden.device).expand(batch, -1), ctx.valid)
        kept: list[Keys] = []
        work, losses = [], []
        for recursion, router in enumerate(self.recursion_routers):
            rows, own = still_in.take(hidden), still_in.context(ctx)
            logit = router(rows)
            if recursion:
                share = 1 - recursion / self.recursions  # of all tokens; chosen among those that are still in
                chosen = top_k(logit, share, own, of=(time, ctx.valid))
                losses.append(decision_loss(logit, chosen.as_mask(logit), own))
                still_in, rows = still_in.among(chosen), chosen.take(rows)
                own, logit = still_in.context(ctx), logit.gather(1, chosen.places)
            for layer, block in enumerate(blocks_of(self.shared)):
                if self.shares_keys and not recursion:
                    kept.append(self._keys_of(block, rows, own))
                rows = block(rows, own, keys=kept[layer] if self.shares_keys else "all")
            hidden = still_in.add(hidden, self.knobs.alpha * torch.sigmoid(logit)[..., None] * rows)
            work.append(still_in.as_mask(hidden[..., 0].detach().float()))
        return hidden, work, {"decision": self.knobs.decision_loss * torch.stack(losses).mean()}

    # -- token choice

    def _token_choice(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """The depth is decided at the entry, in training and in evaluation."""
        logits = self.recursion_routers[0](hidden)
        weight, depth = logits.softmax(-1).max(-1)
        active = depth >= torch.arange(self.recursions, device=hidden.device)[:, None, None]
        if ctx.decisions is not None:
            active = torch.cat([active[:1], ctx.decisions])
        if ctx.valid is not None:
            active = torch.cat([active[:1], active[1:] & ctx.valid])
        state, kept = hidden, []
        for recursion in range(self.recursions):
            state = self._recur(recursion, state, ctx, active[recursion], kept)
            ends = active[recursion] & ~active[recursion + 1 :].any(0)
            hidden = gated_add(hidden, state, gate=weight * ends)
        return hidden, list(active), self._token_losses(logits, depth, ctx) if self.training else {}

    def _token_losses(self, logits: Tensor, depth: Tensor, ctx: Context) -> dict[str, Tensor]:
        balance, z = balance_and_z(logits, depth, ctx)
        return {"balance": self.knobs.balance_loss * balance, "z": self.knobs.z_loss * z}

    # -- the shared block

    def _recur(self, recursion: int, hidden: Tensor, ctx: Context, active: Tensor, kept: list[Keys]) -> Tensor:
        """Phi for the active tokens; if keys and values are shared, the first recursion fills `kept`."""
        rows = Rows(active) if recursion else None
        hidden = ctx.spare(hidden)
        for layer, block in enumerate(blocks_of(self.shared)):
            if self.shares_keys:
                if not recursion:
                    kept.append(self._keys_of(block, hidden, ctx))
                hidden = block(hidden, ctx, rows, keys=kept[layer])
            else:
                own = replace(ctx, layer=1 + recursion * len(self.shared) + layer)
                hidden = block(hidden, own, rows, keys="active" if recursion else "all")
        return hidden

    def _keys_of(self, block: Block, hidden: Tensor, ctx: Context) -> Keys:
        """Keys and values of every token, shared by all recursions."""
        weights = block.attention.kv_weights()
        return block.attention.leave_keys(F.linear(block.norm_attention(hidden), *weights), ctx)

    # -- sites, cache and routers

    def sites(self, keys: int) -> tuple[Site, ...]:
        block = self.first.site("first", keys, routed=False)
        depth = len(self.shared)
        whole = depth * (block.always + block.active)
        later = whole - depth * block.always if self.shares_keys else whole  # without keys and values
        # A recursion's own router, or the one at the entry, which decides for all of them.
        decisions = [router.flops for router in self.recursion_routers if isinstance(router, LinearRouter)]
        decisions += [0] * (self.recursions - len(decisions))
        sites = [block]
        for number, decision in enumerate(decisions):
            cost = later if number else whole
            sites.append(Site(f"recursion {number + 1}", bool(number), 0.0, cost, decision, blocks=depth))
        return (*sites, replace(block, name="last"))

    @property
    def cache_layers(self) -> int:
        """Shared keys and values are only those of the first recursion."""
        layers = self.model.n_layer - 2
        return 2 + (layers // self.knobs.recursions if self.knobs.kv == "shared" else layers)

    def routers(self) -> list[nn.Module]:
        """The routers that decide; the first recursion of expert choice takes every token."""
        return list(self.recursion_routers) if self.by_token else list(self.recursion_routers)[1:]
