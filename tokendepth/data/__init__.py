"""Corpora as batches of token ids. Text is memory-mapped from disk; the tasks copy and sort are generated."""

from tokendepth.data.bpe import BPETokenizer
from tokendepth.data.corpora import load, vocab_size
from tokendepth.data.dataset import Dataset
from tokendepth.data.synthetic import SyntheticDataset
from tokendepth.data.text import TextDataset
from tokendepth.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    SymbolTokenizer,
    TextStream,
    Tokenizer,
    tokenizer_from_dict,
)

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "Dataset",
    "SymbolTokenizer",
    "SyntheticDataset",
    "TextDataset",
    "TextStream",
    "Tokenizer",
    "load",
    "tokenizer_from_dict",
    "vocab_size",
]
