"""Corpora as batches of token ids. Text lies on disk and is memory-mapped; copy and sort are generated."""

from tokendepth.data.corpora import load, vocab_size
from tokendepth.data.dataset import Dataset
from tokendepth.data.synthetic import SyntheticDataset
from tokendepth.data.text import TextDataset
from tokendepth.data.tokenizer import ByteTokenizer, CharTokenizer, SymbolTokenizer, Tokenizer, tokenizer_from_dict

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "Dataset",
    "SymbolTokenizer",
    "SyntheticDataset",
    "TextDataset",
    "Tokenizer",
    "load",
    "tokenizer_from_dict",
    "vocab_size",
]
