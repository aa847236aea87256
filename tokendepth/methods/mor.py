"""Mixture-of-Recursions (Bae et al. 2025): some layers are applied again and again, to fewer and fewer tokens.

Middle-cycle sharing: the first and the last layer are unique, the layers between are one shared block Phi that is
applied `recursions` times. The model's number of layers counts applications, so that at full depth the costs compare.
How a token's number of recursions is chosen:

`expert`: each recursion r has a router, g = alpha * sigmoid(theta_r^T H), and takes the tokens of highest g,

    H <- H + g Phi(H)  if the token is chosen, else H;        capacities N/N, (N-1)/N, ..., 1/N of all tokens

and only tokens that were chosen before (hierarchical filtering). Top-k over a sequence sees the future, so it is for
training, where a binary cross-entropy with "was chosen" as the target teaches each later router the same decision from
the token alone; evaluation takes a token that is still in where its logit is above 0 (probability 0.5).

`token`: one router at the entry, softmax over the recursions; the likeliest depth i is the token's, with g its
probability. It passes Phi i times, and after the last H <- H^1 + g Phi(H), H^1 being the state at the entry. A balance
loss, N * sum_i f_i P_i, and a z-loss, mean logsumexp^2, keep depths in use. This is causal as it is.

Phi(H) is the block's whole output, its inner residual included, as in the authors' code. What later recursions attend
to: `kv` recursion, the tokens that are active at that depth and no others; or shared, the keys and values that the
first recursion left, of every token, so that later ones compute queries alone. The first recursion takes every token.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, MoRConfig
from tokendepth.methods.base import Method
from tokendepth.methods.mod import LinearRouter, membership, put_added, share_of, take, top_k
from tokendepth.model import Block, KeysValues, Pass, Spent, block_site
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import DepthTrace, Site


class MoR(Method):
    has_soft = False
    decides_by_threshold = False

    def __init__(self, model: ModelConfig, config: MoRConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.recursions = config, config.recursions
        self.by_token, self.shares_keys = config.routing == "token", config.kv == "shared"
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

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        every = torch.ones(hidden.shape[:2], device=hidden.device)
        hidden = self.first(hidden, run)
        if self.by_token:
            hidden, work, losses = self._token_choice(hidden, run)
        elif self.training:
            hidden, work, losses = self._train_expert_choice(hidden, run)
        else:
            hidden, work, losses = self._expert_choice(hidden, run)
        hidden = self.last(hidden, run)
        return Spent(hidden, DepthTrace(torch.stack([every, *work, every]), sites, run.execution), losses)

    # -- expert choice

    def _expert_choice(self, hidden: Tensor, run: Pass) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """In evaluation: each router on its own token."""
        active = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        kept: list[KeysValues] = []
        work = []
        for recursion, router in enumerate(self.recursion_routers):
            logit = router(hidden)
            if recursion:
                active = active & (logit > 0) if run.decisions is None else run.decisions[recursion - 1]
                active = active if run.valid is None else active & run.valid
            recurred = self._recur(recursion, hidden, run, active, kept)
            hidden = gated_add(hidden, recurred, gate=self.knobs.alpha * torch.sigmoid(logit) * active)
            work.append(active.float())
        return hidden, work, {}

    def _train_expert_choice(self, hidden: Tensor, run: Pass) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Top-k of those that are still in; only they are computed."""
        batch, time = hidden.shape[:2]
        places = torch.arange(time, device=hidden.device).expand(batch, -1)
        kept: list[KeysValues] = []
        work, losses = [], []
        for recursion, router in enumerate(self.recursion_routers):
            rows = take(hidden, places)
            logit = router(rows)
            if recursion:
                chosen = top_k(logit, share_of(1 - recursion / self.recursions, time))
                losses.append(F.binary_cross_entropy_with_logits(logit, membership(chosen, logit)))
                places, rows, logit = places.gather(1, chosen), take(rows, chosen), logit.gather(1, chosen)
            for layer, block in enumerate(self._shared()):
                if not self.shares_keys:
                    rows = block(rows, run)
                    continue
                if not recursion:
                    kept.append(block.attention.keys_values(block.norm_attention(rows), run))
                rows = block.rows_with(rows, places, kept[layer])
            hidden = put_added(hidden, places, self.knobs.alpha * torch.sigmoid(logit)[..., None] * rows)
            work.append(membership(places, hidden[..., 0].detach().float()))
        return hidden, work, {"decision": self.knobs.decision_loss * torch.stack(losses).mean()}

    # -- token choice

    def _token_choice(self, hidden: Tensor, run: Pass) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """The depth is known at the entry, in training and evaluation alike."""
        logits = self.recursion_routers[0](hidden)
        weight, depth = logits.softmax(-1).max(-1)
        active = depth >= torch.arange(self.recursions, device=hidden.device)[:, None, None]
        if run.decisions is not None:
            active = torch.cat([active[:1], run.decisions])
        if run.valid is not None:
            active = torch.cat([active[:1], active[1:] & run.valid])
        state, kept = hidden, []
        for recursion in range(self.recursions):
            state = self._recur(recursion, state, run, active[recursion], kept)
            ends = active[recursion] & ~active[recursion + 1 :].any(0)
            hidden = gated_add(hidden, state, gate=weight * ends)
        return hidden, list(active.float()), self._token_losses(logits, depth) if self.training else {}

    def _token_losses(self, logits: Tensor, depth: Tensor) -> dict[str, Tensor]:
        share = F.one_hot(depth, self.recursions).float().mean((0, 1))
        balance = self.recursions * (share * logits.softmax(-1).mean((0, 1))).sum()
        z = logits.logsumexp(-1).square().mean()
        return {"balance": self.knobs.balance_loss * balance, "z": self.knobs.z_loss * z}

    # -- the shared block

    def _recur(self, recursion: int, hidden: Tensor, run: Pass, active: Tensor, kept: list[KeysValues]) -> Tensor:
        """Phi for the active tokens; `kept` is filled by the first recursion where keys and values are shared."""
        for layer, block in enumerate(self._shared()):
            if self.shares_keys:
                if not recursion:
                    kept.append(block.attention.keys_values(block.norm_attention(hidden), run))
                hidden = block.forward_with(hidden, run, active, kept[layer])
            elif recursion:
                own = replace(run, layer=1 + recursion * len(self.shared) + layer)
                hidden = block.forward_among(hidden, own, active)
            else:
                hidden = block(hidden, run)
        return hidden

    def _shared(self) -> list[Block]:
        return [block for block in self.shared if isinstance(block, Block)]

    # -- what others ask

    def sites(self, keys: int) -> tuple[Site, ...]:
        block = block_site(self.model, "", keys, routed=False)
        depth, d = len(self.shared), self.model.d_model
        whole = depth * (block.always + block.active)
        later = whole - depth * 4 * d * d if self.shares_keys else whole  # without keys and values
        # A recursion's own router, or the one at the entry, which decides for all of them.
        decisions = [2 * d * self.recursions] if self.by_token else [2 * d] * self.recursions
        decisions += [0] * (self.recursions - len(decisions))
        sites = [replace(block, name="first")]
        for number, decision in enumerate(decisions):
            cost = later if number else whole
            sites.append(Site(f"recursion {number + 1}", bool(number), 0.0, cost, decision, blocks=depth))
        return (*sites, replace(block, name="last"))

    @property
    def cache_layers(self) -> int:
        """Shared keys and values are those of the first recursion alone."""
        layers = self.model.n_layer - 2
        return 2 + (layers // self.knobs.recursions if self.knobs.kv == "shared" else layers)

    def routers(self) -> list[nn.Module]:
        """Those that decide: in the first recursion of expert choice there is nothing to."""
        return list(self.recursion_routers) if self.by_token else list(self.recursion_routers)[1:]
