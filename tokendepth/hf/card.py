"""The model card of an exported run: usage, results, how they were measured and how to reproduce them."""

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from tokendepth.checks import flag
from tokendepth.config import RunConfig, method_name, to_dict
from tokendepth.runs.run import Run

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- tokendepth
- adaptive-depth
# license: which one is for you to choose
---

# {name}

A language model in which every token gets only the depth it needs, trained with
tokendepth {version}: method `{method}`, {layers} layers, width {width}, context {context}, {parameters:,} parameters.

## Use

```python
import tokendepth.hf  # pip install 'tokendepth[hf]'
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer("A prompt", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```

With tokendepth installed, `trust_remote_code=True` does what the first line does. `model.config.execution` is `sparse`:
what the routers skip is not computed. `hard` computes it and throws it away, as a reference; `soft` uses gates as
weights, as in training, if the method has gates.
"""
NOT_MEASURED = "This run was not evaluated before it was exported; `tokendepth evaluate RUN`, then export it again."
HOW = """\
- **sparse** really skips: skipped tokens are not computed. **hard** takes the same decisions but computes everything,
  **soft** uses gates as weights instead of deciding. {flips}
- **Active fraction** is the mean share of tokens that the routed blocks processed, over the same text.
- **FLOPs** are twice the multiply-adds of the matrix products that ran, with attention over the full square and
  including routers and output head; skipped is relative to the same blocks with every token active and no routers.
- Loss is the mean negative log likelihood per token in nats, in float32, on {device}."""


def model_card(run: Run, name: str, parameters: int) -> str:
    import tokendepth

    config, model = run.config, run.config.model
    header = HEADER.format(
        name=name, version=tokendepth.__version__, method=method_name(config.method), layers=model.n_layer,
        width=model.d_model, context=model.context, parameters=parameters,
    )  # fmt: skip
    parts = [header, "## Results\n", *_results(run.evaluation), "\n## How it was trained\n", *_training(config)]
    return "\n".join(parts) + "\n"


def _results(evaluation: dict[str, Any] | None) -> Iterator[str]:
    if evaluation is None:
        yield NOT_MEASURED
        return
    split = {"val": "validation", "test": "test"}[evaluation["split"]]
    yield f"Of the {split} split, {evaluation['tokens']:,} tokens.\n"
    yield "| execution | loss | active fraction | FLOPs skipped |"
    yield "|---|---|---|---|"
    for execution in ("soft", "hard", "sparse"):
        if execution == "soft" and not evaluation["has_soft"]:
            continue
        found = evaluation[execution]
        skipped = f"{100 * evaluation['flops_skipped']:.1f}%" if execution == "sparse" else "none"
        yield f"| {execution} | {found['loss']:.4f} | {found['active_fraction']:.3f} | {skipped} |"
    yield ""
    flips = evaluation["decision_flips"]
    said = "Sparse and hard took the same decisions." if not flips else f"Sparse and hard differ in {flips} decisions."
    yield HOW.format(flips=said, device=evaluation["env"]["device"])


def _training(config: RunConfig) -> Iterator[str]:
    tree = _without_folders(to_dict(config))
    if config.recipe:
        words = [f"tokendepth train {config.recipe} --out RUN"]
        for part in ("data", "model", "method", "train"):
            options = {key: value for key, value in tree[part].items() if (part, key) != ("method", "name")}
            words += [_option(part, key, value) for key, value in options.items() if value is not None]
        yield "```\n" + " \\\n  ".join(words) + "\ntokendepth evaluate RUN\n```"
    else:
        yield "By `tokendepth.train` with this config, then `tokendepth evaluate RUN`:\n"
        yield "```json\n" + json.dumps(tree, indent=2) + "\n```"


def _option(part: str, key: str, value: object) -> str:
    if isinstance(value, bool):
        return flag(f"{part}.{key}" if value else f"{part}.no-{key}")
    return f"{flag(f'{part}.{key}')}={value}"


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    """A model card should not contain its author's paths."""
    data = dict(tree["data"])
    for key in ("corpus", "tokens"):
        kind, colon, path = data[key].partition(":")
        if kind in ("text", "tokenizer"):
            data[key] = f"{kind}{colon}{PurePath(path).name}"
    return {**tree, "data": data}
