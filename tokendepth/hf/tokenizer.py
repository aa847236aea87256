"""Convert a run's tokenizer to a transformers one that gives the same ids."""

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tokendepth.data.bpe import BYTE_OF
from tokendepth.data.tokenizer import SPECIALS
from tokendepth.data.tokenizer import Tokenizer as NativeTokenizer

PADDING = "<|pad|>"
"""Padding token for tokenizers without one: its id is beyond the model's vocabulary, and no text maps to it."""


def fast_tokenizer(native: NativeTokenizer, context: int) -> PreTrainedTokenizerFast:
    tree = native.to_dict()
    make = {"char": _characters, "byte": _bytes, "symbol": _symbols, "bpe": _bpe, "imported": _imported}[native.kind]
    made = PreTrainedTokenizerFast(
        tokenizer_object=make(native, tree),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",  # for generation, prompts must be aligned at their ends
        **_special_tokens(native, tree),
    )
    if made.pad_token is None:
        made.add_special_tokens({"pad_token": PADDING})
    return made


def _characters(native: NativeTokenizer, tree: dict[str, Any]) -> Tokenizer:
    # Words are single characters; an unknown one is an error, as in the run.
    made = Tokenizer(models.WordLevel({char: token for token, char in enumerate(tree["chars"])}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _bytes(native: NativeTokenizer, tree: dict[str, Any]) -> Tokenizer:
    made = Tokenizer(models.BPE(dict(BYTE_OF), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _symbols(native: NativeTokenizer, tree: dict[str, Any]) -> Tokenizer:
    spellings = [spelling.decode() for spelling in native.spellings()]
    made = Tokenizer(models.WordLevel({spelling: token for token, spelling in enumerate(spellings)}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*SPECIALS, r"[\s\S]"))), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _bpe(native: NativeTokenizer, tree: dict[str, Any]) -> Tokenizer:
    """The run's tokenizer.json, used as the run does: no truncation, no dropout, no special tokens around a text."""
    tree = {**tree["tokenizer"], "truncation": None, "padding": None}
    tree["model"] = {**tree["model"], **({"dropout": None} if "dropout" in tree["model"] else {})}
    made = Tokenizer.from_str(json.dumps(tree))
    if made.num_special_tokens_to_add(is_pair=False):
        made = Tokenizer.from_str(json.dumps({**tree, "post_processor": None}))
    return made


def _imported(native: NativeTokenizer, tree: dict[str, Any]) -> Tokenizer:
    """Adds the tokens with which every text of an imported model begins."""
    made = _bpe(native, tree)
    if native.begins:
        first = [(made.id_to_token(token), token) for token in native.begins]
        single = [*(name for name, _ in first), "$A"]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=first)
    return made


def _special_tokens(native: NativeTokenizer, tree: dict[str, Any]) -> dict[str, Any]:
    if native.kind == "symbol":
        return {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "sep_token": "<sep>"}
    if native.kind != "imported":
        return {}
    library, found = _bpe(native, tree), {"chat_template": native.chat_template}
    for name, tokens in (("bos_token", native.begins), ("eos_token", native.stops)):
        found |= {name: library.id_to_token(tokens[0])} if tokens else {}
    return found
