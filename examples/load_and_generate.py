"""Load an exported model with transformers, continue a prompt, and print what the tokens cost.

tokendepth export runs/demo/demo.budget exported
python examples/load_and_generate.py exported "def "
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tokendepth.hf  # noqa: F401  (registers the model with transformers)


def main(folder: str, prompt: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    out = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        max_new_tokens=40,
        do_sample=True,
        temperature=0.8,
        output_depth=True,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(out.sequences[0]))
    spent = out.past_key_values.spent()
    print(f"active fraction {spent.active_fraction:.3f}, FLOPs skipped {100 * spent.flops_skipped:.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:3])
