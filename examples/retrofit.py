"""Retrofit a dense model to execute 80% of its blocks' FLOPs, and print what that costs in loss.

python examples/retrofit.py

Any finished dense run can replace the one trained here.
"""

import argparse

import tokendepth as td

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", default="runs/example-retrofit")
parser.add_argument("--corpus", default="stdlib")
parser.add_argument("--steps", type=int, default=300, help="for the dense model; the retrofit takes half as many")
options = parser.parse_args()

config = td.recipe("demo.dense", {"data.corpus": options.corpus, "train.steps": options.steps})
dense = td.train(config, f"{options.out}/dense", resume=True)

changes = {"train.steps": options.steps // 2, "train.lr": 3e-4}
routed = td.retrofit(dense, f"{options.out}/routed", budget=0.8, changes=changes, resume=True)

figures = td.evaluate(routed, timing=False)
print(f"untouched       loss {figures['untouched']['loss']:.4f}")
print(f"at the budget   loss {figures['sparse']['loss']:.4f}, {figures['block_flops']:.3f} of the block FLOPs")
full = td.evaluate(routed, timing=False, budget=1.0)
print(f"at full budget  loss {full['sparse']['loss']:.4f}, the same weights")
