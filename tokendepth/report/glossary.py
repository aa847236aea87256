"""What the page's words mean, one plain sentence each."""

from tokendepth.report.summary import COLLAPSE, NOISE

GLOSSARY = {
    "dense": "A model in which every token passes every layer; the others are measured against it.",
    "router": "A small network in front of a layer (a transformer block) that decides on which tokens the layer works.",
    "stem": "The first layer, block 0, which works on every token.",
    "soft": "Every layer is computed for every token and its update is multiplied by a gate between 0 and 1, as "
    "in the paper's training, so nothing is skipped.",
    "hard": "The same full computation with every gate rounded to 0 or 1: the reference that sparse has to match.",
    "sparse": "Work on skipped tokens is left out; the result equals hard up to rounding, and this is what is timed.",
    "executed": "Run with yes-or-no decisions, hard or sparse, never with soft gates.",
    "active fraction": "Share of the tokens on which the routed layers work; under soft, the mean of the gates.",
    "TLOps": "Token-layer operations: one token in one layer counts as one whatever it costs, so they are neither "
    "FLOPs nor time.",
    "TLOps saved": "What soft gates would save if a gate of 0.3 made a layer cost 0.3: a weighting, since all ran.",
    "work skipped": "Share of the token-layer operations, the stem's included, that were left out when the model ran.",
    "FLOPs skipped": "Share of the dense model's arithmetic (two per multiply-add of a matrix product, output head "
    "included) that did not run; routers count against it, so it can be negative.",
    "budget": "The share of the tokens on which each routed layer may work, named before the model runs.",
    "dial": "Training for all budgets at once, so that one set of weights can be turned up or down afterwards.",
    "speed vs dense": "Time of the dense model of the same shape over the time of sparse execution, medians of a "
    "forward pass on the device and batch beside it; above 1x is faster.",
    "loss": "Mean surprisal of the validation text's tokens, minus the logarithm of the probability that the model "
    "gave them, in nats (or in bits per character or byte); lower is better.",
    "accuracy": "Share of the tokens that the model got right as its first choice.",
    "collapses when executed": f"The hard loss exceeds the soft loss by more than {COLLAPSE:.0%}, so what soft "
    "promises cannot be had.",
    "seed": "Fixes what is random in training; ± is the standard deviation over seeds, and with fewer than three of "
    f"them {NOISE}, the spread of five seeds of one dense model on Tiny-Shakespeare.",
}
