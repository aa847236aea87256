"""Who is compared on where depth pays, declared: for every method one main knob with two values, and why that knob.

All are trained on the bytes of enwik8 with the same block, optimiser and batches. Each value of a knob comes with the
number of layers at which the method executes about the FLOPs of six dense layers, so that no method is chosen for
spending more. Only a learning rate and a knob are chosen, by `search.py`; all else is the method's default. Nobody
trains by two passes: only budget routing has them, and on this text they cost it quality (docs/LOG.md).
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
"""The most promising first: a search that is cut short has it for everybody. Each is twice its neighbour."""
SHORT, LONG = 800, 4000
"""Steps of a run of the search, and of one that is reported."""
WARM_UP = 8
"""The rate rises over one of so many steps, in short and in long runs. Without a warm-up 2e-3 cost dense models 4%, and
12 of their layers lost to 8. Routed models are deeper than dense ones of their cost, so its absence was their handicap.
With 100 of 4,000 steps some seeds of dense models lay 2.6% apart (docs/LOG.md)."""


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    method: str
    """As METHOD_CONFIGS calls it."""
    knob: str
    why: str
    """That this is its main knob."""
    values: dict[str, str]
    """What each value is called in tables, and its overrides, as `sweep` reads them."""

    def __hash__(self) -> int:
        return hash(self.name)

    @cache  # noqa: B019 contenders live as long as the program; a page asks for the same configs thousands of times
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
    "nothing else decides what a dense model costs; these three make the line that all others are judged by",
    {f"{n} layers": f"model.n-layer={n}" for n in (4, 6, 8)},
)  # fmt: skip
THIN = Contender(
    "thin", "dense, thin and deep", "dense", "shape",
    "a control: depth bought with width at the same FLOPs, and nothing routed",
    {
        "10 layers of 192": "model.n-layer=10:model.d-model=192:model.n-head=3:model.d-ff=512",
        "14 layers of 160": "model.n-layer=14:model.d-model=160:model.n-head=5:model.d-ff=432",
    },
)  # fmt: skip
ONE_PASS = "method.dial=False:method.distill=0"
DECIDERS = {
    "rule": "span by a rule on the text",
    "boundary": "span by learned boundaries",
    "taught": "span by boundaries that were taught the rule",
    "entropy": "span by the entropy of the next token",
    "gain": "span by what skipping costs",
    "score": "span by a learned score",
}
"""Of span routing, with their titles; each is a contender of its own: who decides is the question."""


HOW_THEY_DECIDE = {
    "boundary": "boundary:method.carry=smooth",  # as H-Net has it
    "taught": "boundary:method.carry=smooth:method.taught=0.25",
}
"""Where a decider is not of that name alone."""


def _span(decider: str) -> Contender:
    shapes = {
        "2 + 8 + 2 layers": "model.n-layer=12:method.begin=2:method.length=8",
        "3 + 4 + 2 layers": "model.n-layer=9:method.begin=3:method.length=4",
    }
    fixed = f"method.budget=0.25:method.decide={HOW_THEY_DECIDE.get(decider, decider)}"
    return Contender(
        f"span_{decider}", DECIDERS[decider], "span", "length of the span", "how much depth one decision stands for",
        {words: f"{shape}:{fixed}" for words, shape in shapes.items()},
    )  # fmt: skip


CONTENDERS = (
    DENSE,
    THIN,
    Contender(
        "tsa", "TSA", "tsa", "depth penalty", "the price of depth is all that can be told to it",
        {f"penalty {value}": f"model.n-layer=8:method.depth-penalty={value}" for value in ("0.001", "0.01")},
    ),
    Contender(
        "budget", "budget routing", "budget", "budget", "the share of tokens that each block works on",
        {
            "0.65, 8 layers": f"model.n-layer=8:method.budget=0.65:{ONE_PASS}",
            "0.4, 11 layers": f"model.n-layer=11:method.budget=0.4:{ONE_PASS}",
        },
    ),
    Contender(
        "mod", "Mixture-of-Depths", "mod", "capacity", "the paper's own ablation: how few tokens a block takes",
        {
            "0.125, 10 layers": "model.n-layer=10:method.capacity=0.125",
            "0.5, 8 layers": "model.n-layer=8:method.capacity=0.5",
        },
    ),
    Contender(
        "early_exit", "early exit", "early_exit", "who decides", "its two papers differ in this alone",
        {
            "confidence, 8 layers": "model.n-layer=8:method.exit=confidence",
            "learned, 8 layers": "model.n-layer=8:method.exit=learned:method.oracle=likelihood",
        },
    ),
    Contender(
        "mor", "Mixture-of-Recursions", "mor", "recursions", "how often the shared layers return",
        {f"{n} recursions, 8 layers": f"model.n-layer=8:method.recursions={n}" for n in (2, 3)},
    ),
    Contender(
        "act", "ACT", "act", "ponder cost", "the price of a step; its paper calls results sensitive to it",
        {f"ponder cost {value}": f"model.n-layer=8:method.ponder-cost={value}" for value in ("0.01", "0.001")},
    ),
    Contender(
        "itt", "Inner Thinking", "itt", "steps", "how often a layer thinks: the paper's main ablation",
        {
            "2 steps, 5 layers": "model.n-layer=5:method.steps=2",
            "4 steps, 3 layers": "model.n-layer=3:method.steps=4",
        },
    ),
    Contender(
        "switch", "Switch", "switch", "experts", "how many networks there are to choose from; it saves no depth",
        {f"{n} experts": f"model.n-layer=6:method.experts={n}" for n in (4, 8)},
    ),
    *map(_span, DECIDERS),
)  # fmt: skip


def miniature(config: RunConfig) -> RunConfig:
    """The same experiment at a size that a CPU trains in a fraction of a second; what is larger stays larger."""
    small = tables.miniature(replace(config, train=replace(config.train, warmup=0)), layers=config.model.n_layer)
    wider, longer = max(1, config.model.d_model // MODEL.d_model), config.model.context // MODEL.context
    shape = {"d_model": wider * small.model.d_model, "context": longer * small.model.context}
    steps = max(2, small.train.steps * config.train.steps // LONG)
    rhythm = {"warmup": min(1, steps - 1), "eval_every": steps, "checkpoint_every": steps}
    train = replace(small.train, lr=config.train.lr, steps=steps, **rhythm)
    # A text that is soon read: training ends with a validation. It has no more than some hundred BPE tokens.
    tokens = "bpe:300" if config.data.token_kind == "bpe" else config.data.tokens
    data = replace(small.data, corpus=f"text:{PAPER}", tokens=tokens)
    return replace(small, data=data, model=replace(small.model, **shape), train=train)
