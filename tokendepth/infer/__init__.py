"""Inference: generating text, compiling, and choosing between sparse and dense execution."""
