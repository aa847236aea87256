"""The tokenizer stored in a run folder, and the text that the run is evaluated on, with that tokenizer."""

from dataclasses import replace

from tokendepth.config import NO_CORPUS, OWN_TOKENS
from tokendepth.data.corpora import load
from tokendepth.data.dataset import Dataset
from tokendepth.data.tokenizer import Tokenizer, tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.runs.run import Run


def tokenizer_of(run: Run) -> Tokenizer:
    """The run's tokenizer, checked to fit the model, which may have more tokens: imported ones are often padded."""
    tokenizer, expected = tokenizer_from_dict(run.tokenizer), run.config.model.vocab_size
    if tokenizer.vocab_size > expected:
        found = f"{run.path / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, the model {expected}"
        raise UserError(f"{found}; restore the folder from a copy")
    return tokenizer


def dataset_of(run: Run, corpus: str | None = None) -> Dataset:
    """The corpus that a run was trained on, checked to be unchanged; or another `corpus` to measure it on."""
    config = run.config.data
    if corpus is not None:
        if config.synthetic:
            raise UserError(f"--corpus is {corpus!r}, but {run.path} has the symbols of {config.corpus}; drop it")
        return load(replace(config, corpus=corpus), tokenizer_of(run))
    if config.corpus == NO_CORPUS:
        raise UserError(f"{run.path} was imported without a corpus; name a text with --corpus text:PATH")
    # The file of tokenizer:PATH may be gone, but the run has a copy; a BPE trained on the corpus is in the cache.
    own = tokenizer_of(run) if config.token_kind in ("tokenizer", OWN_TOKENS) else None
    dataset = load(config, own)
    run.check_corpus(dataset.fingerprint)
    return dataset
