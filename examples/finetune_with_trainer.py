"""Fine-tune an exported model on a text file with the transformers Trainer, and save it.

tokendepth export runs/demo/demo.budget exported
python examples/finetune_with_trainer.py exported my.txt finetuned
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import tokendepth.hf  # noqa: F401  (registers the model with transformers)


def main(folder: str, text: str, out: str, steps: str = "100") -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    windows = ids.unfold(0, model.config.max_position_embeddings, model.config.max_position_embeddings)
    arguments = TrainingArguments(
        out,
        max_steps=int(steps),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-4,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_nan_inf_filter=False,  # show a loss that is NaN
    )
    examples = [{"input_ids": window, "labels": window} for window in windows]
    Trainer(model, arguments, train_dataset=examples).train()
    if model.has_budget:  # the weights have changed, so the budget needs new thresholds
        model.calibrate(windows)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    with torch.no_grad():
        depth = model.eval()(windows[:8].to(model.device), output_depth=True).depth.totals()
    print(f"{out}: active fraction {depth.active_fraction:.3f}, FLOPs skipped {100 * depth.flops_skipped:.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
