"""The terms on the page, each explained in one plain sentence."""

from tokendepth.report.summary import COLLAPSE, NOISE

GLOSSARY = {
    "dense": "A model in which every token goes through every layer; the baseline for all others.",
    "router": "A small network in front of a layer (a transformer block) that decides which tokens it processes.",
    "stem": "The first layer, block 0, which processes every token.",
    "soft": "Every layer is computed for every token and its update is multiplied by a gate between 0 and 1, as "
    "in the training of the TSA paper, so nothing is skipped.",
    "hard": "The same full computation with every gate set to 0 or 1: the reference that sparse has to match.",
    "sparse": "Skipped tokens are not computed; the result equals hard up to rounding, and this is what is timed.",
    "executed": "Run with yes-or-no decisions, hard or sparse, never with soft gates.",
    "active fraction": "Share of tokens that the routed layers process; under soft, the mean of the gates.",
    "TLOps": "Token-layer operations: one token going through one layer counts as one, whatever it costs, so they are "
    "neither FLOPs nor time.",
    "TLOps saved": "What soft gates would save if a gate of 0.3 made a layer cost 0.3; this is only a weighting, since "
    "every layer is computed.",
    "work skipped": "Share of the token-layer operations, including the stem's, that were really skipped.",
    "FLOPs skipped": "Share of the FLOPs of the same model without routers and skipping (two per multiply-add of a "
    "matrix product, including the output head) that was not executed; negative if routers cost more than they save.",
    "budget": "The share of tokens that each routed layer may process, set before the model runs.",
    "dial": "Training for all budgets at once, so that one set of weights can run at any of them.",
    "speed vs dense": "Median time of a forward pass of the dense model of the same shape, divided by that of sparse "
    "execution, on the device and at the batch size shown; above 1x is faster.",
    "loss": "Mean surprisal of the tokens of the validation text, which is minus the logarithm of the probability that "
    "the model gave them, in nats (or in bits per character or byte); lower is better.",
    "accuracy": "Share of tokens for which the model's first choice was right.",
    "collapses when executed": f"The hard loss exceeds the soft loss by more than {COLLAPSE:.0%}, so the savings shown "
    "under soft cost quality when tokens are really skipped.",
    "seed": "Fixes the randomness of training; ± is the standard deviation over seeds, and with fewer than three of "
    f"them {NOISE} (the spread of five seeds of one dense model on Tiny-Shakespeare).",
}
