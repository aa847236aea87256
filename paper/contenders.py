"""The contenders of docs/WHERE_DEPTH_PAYS.md: for every method one main knob with two values, and why that knob.

All are trained on the bytes of enwik8 with the same block, optimiser and batches. Each value of a knob comes with the
number of layers at which the method executes about the FLOPs of six dense layers, so that no method is chosen for
spending more. Only a learning rate and a knob are chosen, by `search.py`; everything else is the method's default. All
train with one forward pass per step: only budget routing has a second one, and on this text it gained nothing
(docs/LOG.md).
"""

from dataclasses import dataclass, replace
from functools import cache

from paper import tables
from paper.evidence import PAPER
from tokendepth.config import METHOD_CONFIGS, DataConfig, ModelConfig, RunConfig, TrainConfig, override

DATA = DataConfig("enwik8", "byte")
MODEL = ModelConfig(
    d_model=256, n_layer=6, n_head=4, d_ff=688, context=256, dropout=0.0, norm="rms", positions="rotary", qk_norm=True,
    ffn="swiglu", ffn_bias=False,
)  # fmt: skip
RATES = (2e-3, 1e-3, 4e-3, 5e-4)
"""The most promising first, so that a search cut short has it for all. Sorted, each is twice the next."""
SHORT, LONG = 800, 4000
"""Steps of a run in the search, and of a run that is reported."""
WARM_UP = 8
"""The learning rate rises over 1/8 of the steps, in short and in long runs. Without a warm-up 2e-3 cost dense models
4%, and 12 layers lost to 8. Routed models are deeper than dense ones of the same cost, so that was their handicap. With
a warm-up of 100 of 4,000 steps, some seeds of dense models were 2.6% apart (docs/LOG.md)."""


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    method: str
    """Its name in METHOD_CONFIGS."""
    knob: str
    why: str
    """Why this is its main knob."""
    values: dict[str, str]
    """The name of each value in tables, and its overrides, as `sweep` reads them."""

    def __hash__(self) -> int:
        return hash(self.name)

    @cache  # noqa: B019 contenders live as long as the program; a page needs the same configs thousands of times
    def config(self, value: str, rate: float, steps: int, seed: int = 0) -> RunConfig:
        every = steps if steps == SHORT else steps // 4
        train = TrainConfig(
            steps=steps, batch_size=64, lr=rate, warmup=steps // WARM_UP, seed=seed, eval_every=every,
            checkpoint_every=steps,
        )  # fmt: skip
        config = RunConfig(DATA, MODEL, METHOD_CONFIGS[self.method](), train)
        changes = (change.split("=") for change in self.values[value].split(":"))
        return override(config, {key.replace("-", "_"): chosen for key, chosen in changes})

    def run_name(self, value: str, rate: float, steps: int, seed: int = 0) -> str:
        plain = value.replace(", ", "-").replace(" ", "_")
        return f"{self.name}-{plain}-lr={rate:g}-steps={steps}-seed{seed}"


DENSE = Contender(
    "dense", "dense", "dense", "layers",
    "nothing else changes the cost of a dense model; these three make the line that all others are compared with",
    {f"{n} layers": f"model.n-layer={n}" for n in (4, 6, 8)},
)  # fmt: skip
THIN = Contender(
    "thin", "dense, thin and deep", "dense", "shape",
    "a control: more depth and less width at the same FLOPs, without routing",
    {
        "10 layers of 192": "model.n-layer=10:model.d-model=192:model.n-head=3:model.d-ff=512",
        "14 layers of 160": "model.n-layer=14:model.d-model=160:model.n-head=5:model.d-ff=432",
    },
)  # fmt: skip
ONE_PASS = "method.dial=False:method.distill=0"
DECIDERS = {
    "rule": "span, word ends",
    "boundary": "span, learned boundaries",
    "taught": "span, boundaries taught word ends",
    "entropy": "span, entropy",
    "gain": "span, predicted cost of skipping",
    "score": "span, learned score",
}
"""Deciders of span routing and their titles. Each is its own contender: the question is which one decides best."""
SPAN_DICE = "span, random"
"""The control: random decisions."""
FOLDERS = {
    DECIDERS["rule"]: "span by a rule on the text",
    DECIDERS["boundary"]: "span by learned boundaries",
    DECIDERS["taught"]: "span by boundaries that were taught the rule",
    DECIDERS["entropy"]: "span by the entropy of the next token",
    DECIDERS["gain"]: "span by what skipping costs",
    DECIDERS["score"]: "span by a learned score",
    SPAN_DICE: "span by dice",
}
"""Their older titles, which run folders keep, so that an interrupted call finds them."""


HOW_THEY_DECIDE = {
    "boundary": "boundary:method.carry=smooth",  # as in H-Net
    "taught": "boundary:method.carry=smooth:method.taught=0.25",
}
"""Options of deciders that need more than `method.decide=NAME`."""


def _span(decider: str) -> Contender:
    shapes = {
        "2 + 8 + 2 layers": "model.n-layer=12:method.begin=2:method.length=8",
        "3 + 4 + 2 layers": "model.n-layer=9:method.begin=3:method.length=4",
    }
    fixed = f"method.budget=0.25:method.decide={HOW_THEY_DECIDE.get(decider, decider)}"
    return Contender(
        f"span_{decider}", DECIDERS[decider], "span", "length of the span", "how many blocks one decision covers",
        {words: f"{shape}:{fixed}" for words, shape in shapes.items()},
    )  # fmt: skip


CONTENDERS = (
    DENSE,
    THIN,
    Contender(
        "tsa", "TSA", "tsa", "depth penalty", "it takes no budget, only a price for depth",
        {f"penalty {value}": f"model.n-layer=8:method.depth-penalty={value}" for value in ("0.001", "0.01")},
    ),
    Contender(
        "budget", "budget routing", "budget", "budget", "the share of tokens that each block processes",
        {
            "0.65, 8 layers": f"model.n-layer=8:method.budget=0.65:{ONE_PASS}",
            "0.4, 11 layers": f"model.n-layer=11:method.budget=0.4:{ONE_PASS}",
        },
    ),
    Contender(
        "mod", "Mixture-of-Depths", "mod", "capacity", "its paper's own ablation: how few tokens a block takes",
        {
            "0.125, 10 layers": "model.n-layer=10:method.capacity=0.125",
            "0.5, 8 layers": "model.n-layer=8:method.capacity=0.5",
        },
    ),
    Contender(
        "early_exit", "early exit", "early_exit", "who decides", "the only difference between its two papers",
        {
            "confidence, 8 layers": "model.n-layer=8:method.exit=confidence",
            "learned, 8 layers": "model.n-layer=8:method.exit=learned:method.oracle=likelihood",
        },
    ),
    Contender(
        "mor", "Mixture-of-Recursions", "mor", "recursions", "how often the shared layers are applied",
        {f"{n} recursions, 8 layers": f"model.n-layer=8:method.recursions={n}" for n in (2, 3)},
    ),
    Contender(
        "act", "ACT", "act", "ponder cost", "the price of a step; its paper calls the results sensitive to it",
        {f"ponder cost {value}": f"model.n-layer=8:method.ponder-cost={value}" for value in ("0.01", "0.001")},
    ),
    Contender(
        "itt", "Inner Thinking", "itt", "steps", "how often a layer is applied: its paper's main ablation",
        {
            "2 steps, 5 layers": "model.n-layer=5:method.steps=2",
            "4 steps, 3 layers": "model.n-layer=3:method.steps=4",
        },
    ),
    Contender(
        "switch", "Switch", "switch", "experts", "the number of networks to choose from; it saves no depth",
        {f"{n} experts": f"model.n-layer=6:method.experts={n}" for n in (4, 8)},
    ),
    *map(_span, DECIDERS),
)  # fmt: skip


def miniature(config: RunConfig) -> RunConfig:
    """The same experiment at a size that a CPU trains in a fraction of a second; larger models stay larger."""
    small = tables.miniature(replace(config, train=replace(config.train, warmup=0)), layers=config.model.n_layer)
    wider, longer = max(1, config.model.d_model // MODEL.d_model), config.model.context // MODEL.context
    shape = {"d_model": wider * small.model.d_model, "context": longer * small.model.context}
    steps = max(2, small.train.steps * config.train.steps // LONG)
    rhythm = {"warmup": min(1, steps - 1), "eval_every": steps, "checkpoint_every": steps}
    train = replace(small.train, lr=config.train.lr, steps=steps, **rhythm)
    # A short text, since training ends with a validation. It has only a few hundred BPE tokens.
    tokens = "bpe:300" if config.data.token_kind == "bpe" else config.data.tokens
    data = replace(small.data, corpus=f"text:{PAPER}", tokens=tokens)
    return replace(small, data=data, model=replace(small.model, **shape), train=train)
