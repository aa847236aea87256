"""Plans a retrofit: from a finished dense run and a budget to a config with the blocks and the share of the tokens.

The budget is a share of the untouched model's block FLOPs, with attention over the full context. It determines the
share of tokens that take the routed blocks: the other blocks, and keys and values, are computed for every token.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokendepth import data
from tokendepth.config import (
    NO_CORPUS,
    OWN_TOKENS,
    BudgetConfig,
    DataConfig,
    DenseConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    SpanConfig,
    override,
)
from tokendepth.data import Dataset, tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.measure.block_changes import choose_span, sample, shares_by_update
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import outline
from tokendepth.model import LanguageModel
from tokendepth.progress import Progress
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.trace import Site
from tokendepth.training.retrofit import check_base
from tokendepth.training.retrofit_options import ROUTERS, TRAIN, RetrofitOptions, RouterChoice

SPAN_ANNEAL, ANNEAL = 0.1, 0.5
"""Share of the training during which the share of active tokens falls from 1, for a span and for single blocks."""
SHARE = 0.25
"""By default a span is as long as it takes for this share of the tokens to take it."""


def plan(
    base: Run,
    options: RetrofitOptions,
    changes: Mapping[str, Any] | None = None,
    *,
    begun: RunConfig | None = None,
    show: bool = False,
) -> RunConfig:
    """The checked config of the retrofit; `changes` overrides values by their dotted names, as in `recipe`.

    begun: the config of the same retrofit if it was started before; what was measured then is not measured again.
    """
    check_base(base)
    model = _model(base, options)
    what = (options.trains, options.rank, options.distill, options.routers_first)
    start = RetrofitConfig(str(base.path), base.fingerprint, *what)
    config = RunConfig(_data(base, options.corpus), model, DenseConfig(), TRAIN, f"retrofit.{options.method}", start)
    changes = changes or {}
    config = override(config, {name: value for name, value in changes.items() if name.startswith("train.")})
    with Progress(f"reading {config.data.corpus}", show=show):
        dataset = data.load(config.data)
    _check_tokens(base, config, dataset)
    dataset.check_context(model.context)
    measured = _Measured(base, options, config, dataset, begun, show)
    if options.method in ("drop", "replace"):
        by_budget = max(1, math.floor((1 - options.budget) * model.n_layer + 1e-9))
        count = by_budget if options.drop is None else options.drop
        dropped = measured.dropped(_fitting("--drop", count, model.n_layer - 1, model))
        if options.method == "replace":
            replaced = SpanConfig(dropped.start, count, 0.0, decide="dice", carry="none", bypass=True)
            config = replace(config, method=replaced)
        else:
            left = replace(model, n_layer=model.n_layer - count)
            config = replace(config, model=left, retrofit=replace(start, drop=count, drop_from=dropped.start))
    elif options.method != "dense":
        config = replace(config, method=_routed(options, config, measured))
    return override(config, changes)


def _model(base: Run, options: RetrofitOptions) -> ModelConfig:
    model = base.config.model
    if options.context is None or options.context == model.context:
        return model
    if model.positions == "learned":
        own = f"{base.path} has learned its {model.context} positions"
        raise UserError(f"--context is {options.context}, but {own}; drop it")
    if options.context > model.context:
        raise UserError(f"--context is {options.context}; expected up to {model.context}, which {base.path} can read")
    return replace(model, context=options.context)


def _data(base: Run, corpus: str | None) -> DataConfig:
    """The config of the corpus, with the base's tokenizer."""
    own = base.config.data
    if corpus is None and own.corpus == NO_CORPUS:
        raise UserError(f"{base.path} was imported without a corpus; name a text with --corpus text:PATH")
    if corpus in (None, own.corpus) and own.tokens != OWN_TOKENS:
        return own
    if own.synthetic:
        raise UserError(f"--corpus is {corpus!r}, but the base's tokens are the symbols of {own.corpus}; drop it")
    tokens = "byte" if own.tokens == "byte" else f"tokenizer:{base.path / 'tokenizer.json'}"
    return DataConfig(corpus or own.corpus, tokens)


def _check_tokens(base: Run, config: RunConfig, dataset: Dataset) -> None:
    if dataset.tokenizer != tokenizer_from_dict(base.tokenizer):
        raise UserError(
            f"the tokens of {config.data.corpus!r} ({dataset.tokenizer.vocab_size}) are not those of {base.path} "
            f"({base.config.model.vocab_size}): the text has changed since; name a copy of it as --corpus text:PATH"
        )


def _fitting(name: str, count: int, most: int, model: ModelConfig) -> int:
    if not 1 <= count <= most:
        raise UserError(f"{name} is {count}; expected 1 to {most} of the model's {model.n_layer} blocks")
    return count


# --- shares -----------------------------------------------------------------------------------------------------------


def block_flops(config: RunConfig, share: float | None = None) -> float:
    """Block FLOPs per token, routers included, if `share` of the tokens takes the routed blocks.

    With None: without routers, and with every token taking every block.
    """
    return _flops(outline(config).method.sites(keys=config.model.context), share)


def _flops(sites: tuple[Site, ...], share: float | None) -> float:
    if share is None:
        return sum(site.always + site.active for site in sites)
    return sum(site.always + site.router + site.active * (share if site.routed else 1) for site in sites)


def share_for(config: RunConfig, budget: float) -> float:
    """The share of tokens for which `budget` of the untouched block FLOPs is executed; 0 or less: impossible."""
    if budget == 1:
        return 1.0
    sites = outline(config).method.sites(keys=config.model.context)
    least, most, untouched = (_flops(sites, share) for share in (0.0, 1.0, None))
    return (budget * untouched - least) / (most - least)


def executed_share(config: RunConfig, base: RunConfig) -> float:
    """The share of the untouched model's block FLOPs that is executed at the config's own budget."""
    share = getattr(config.method, "budget", 1.0)
    untouched = replace(base, model=replace(base.model, context=config.model.context))
    return block_flops(config, share) / block_flops(untouched)


def span_length(config: RunConfig, budget: float) -> int:
    """The default number of blocks in a span."""
    blocks, model = config.model.n_layer, replace(config.model, n_layer=1)
    (site,) = outline(replace(config, model=model, method=DenseConfig())).method.sites(keys=model.context)
    # Blocks that a token has to skip on average; their keys and values are computed nevertheless.
    skipped = (1 - budget) * blocks * (site.always + site.active) / site.active
    return min(max(1, math.ceil(skipped / (1 - SHARE))), blocks)


def _span(
    begin: int,
    length: int,
    share: float,
    router: RouterChoice = "teacher",
    draft: float = 0.0,
    *,
    bypass: bool = True,
) -> SpanConfig:
    decide: dict[RouterChoice, dict[str, Any]] = {
        **{gain: {"decide": "gain", "gain": gain} for gain in ("kl", "teacher", "loss")},
        "straight": {"decide": "score", "learn": "straight"},
        "dice": {"decide": "dice"},
    }
    how = {"anneal": SPAN_ANNEAL, "draft": draft, "bypass": bypass, **decide[router]}
    return SpanConfig(begin, length, share, keys="all", carry="none", **how)


def _per_block(share: float, router: RouterChoice, shares: str = "", draft: float = 0.0) -> BudgetConfig:
    learn: dict[RouterChoice, dict[str, Any]] = {
        "update": {"learn": "update"},
        "straight": {"learn": "straight"},
        "dice": {"routing": "random"},
    }
    if draft:  # each sequence runs at its own budget and at full budget, and the first pass learns from the second
        return BudgetConfig(share, dial=True, distill=draft, **learn[router])
    return BudgetConfig(share, dial=False, distill=0.0, shares=shares, anneal=ANNEAL, **learn[router])


def _routed(options: RetrofitOptions, config: RunConfig, measured: "_Measured") -> MethodConfig:
    router, blocks = options.router or ROUTERS[options.method][0], config.model.n_layer
    if options.method == "budget":
        if blocks < 2:
            raise UserError("--method budget routes every block but the first, and the base has one; take a deeper one")
        share = _checked_share(replace(config, method=_per_block(1.0, router)), options, "routed blocks")
        alike = router == "dice" or options.draft > 0
        return _per_block(share, router, "" if alike else measured.shares(share), options.draft)
    length = span_length(config, options.budget) if options.length is None else options.length
    length = _fitting("--length", length, blocks, config.model)
    if options.begin is not None and not 0 <= options.begin <= blocks - length:
        raise UserError(
            f"--begin is {options.begin}; expected 0 to {blocks - length}, since the span has {length} of {blocks} "
            "blocks"
        )
    span = functools.partial(_span, length=length, router=router, draft=options.draft, bypass=options.bypass)
    share = _checked_share(replace(config, method=span(begin=0, share=1.0)), options, "span")
    return span(begin=measured.span(length).start if options.begin is None else options.begin, share=share)


def _checked_share(config: RunConfig, options: RetrofitOptions, where: str) -> float:
    share = round(share_for(config, options.budget), 4)
    if share <= 0:
        least = block_flops(config, 0.0) / block_flops(config)
        longer = ", or a longer --length" if options.method == "span" else ""
        raise UserError(
            f"--budget is {options.budget:g}, but {least:.3f} of the block FLOPs is spent also where no token takes "
            f"the {where}; name a higher budget{longer}"
        )
    return min(share, 1.0)


@dataclass(frozen=True)
class _Measured:
    """Measurements on the untouched model, unless `begun` already has their results."""

    base: Run
    options: RetrofitOptions
    config: RunConfig
    dataset: Dataset
    begun: RunConfig | None
    show: bool

    def span(self, length: int) -> range:
        if self.begun is not None:
            begin, own = getattr(self.begun.method, "begin", 0), getattr(self.begun.method, "length", length)
            if length != own:
                raise UserError(
                    f"{self.options.budget:g} of the FLOPs wants a span of {length} blocks, but the run to be "
                    f"resumed has one of {own}; resume it with the --budget and --length it began with"
                )
            return range(begin, begin + length)
        return self._chosen(length)

    def dropped(self, count: int) -> range:
        if self.begun is not None and self.begun.retrofit is not None:
            return self.begun.retrofit.dropped or self.span(count)
        return self._chosen(count)

    def shares(self, budget: float) -> str:
        if self.begun is not None:
            return getattr(self.begun.method, "shares", "")
        ids, _ = sample(self.dataset, self.config.model.context)
        return ",".join(f"{share:.3f}" for share in shares_by_update(self._model(), ids, budget))

    def _chosen(self, length: int) -> range:
        batch = sample(self.dataset, self.config.model.context)
        return choose_span(self._model(), batch, length, self.options.choose, show=self.show)

    def _model(self) -> LanguageModel:
        return _untouched(self.base.path, self.base.fingerprint, self.config.train.device)


@functools.lru_cache(maxsize=1)
def _untouched(path: Path, fingerprint: str, device: str) -> LanguageModel:
    """Cached, because several plans for the same base often follow one another."""
    return load_model(Run.open(path), choose_device(device, "--train.device"))


def in_words(config: RunConfig, base: RunConfig) -> str:
    """One line for the user: the dropped or routed blocks, the share of tokens, and the share of the FLOPs."""
    assert config.retrofit is not None
    told = f"{executed_share(config, base):.3f} of the block FLOPs"
    sites = outline(config).method.sites(keys=1)
    dropped, routed = config.retrofit.dropped, [n for n, site in enumerate(sites) if site.routed]
    if dropped:
        return f"blocks {dropped.start} to {dropped[-1]} of {base.model.n_layer} are dropped: {told}"
    if not routed:
        return f"every token takes all {len(sites)} blocks: {told}"
    share = getattr(config.method, "budget", 1.0)
    if not share:
        return f"a linear map replaces blocks {routed[0]} to {routed[-1]} of {len(sites)}: {told}"
    return f"blocks {routed[0]} to {routed[-1]} of {len(sites)} are taken by {share:.3f} of the tokens: {told}"


def begun_in(out: str | Path) -> RunConfig | None:
    """The config of the retrofit that was started in `out`, if there is one."""
    if not (Path(out) / "config.json").is_file():
        return None
    config = Run.open(out).config
    return config if config.retrofit is not None else None
