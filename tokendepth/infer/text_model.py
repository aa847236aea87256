"""A trained model with its tokenizer: text or token ids in, logits and a trace out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tokendepth.data.of_run import tokenizer_of
from tokendepth.data.tokenizer import Tokenizer
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import load_model
from tokendepth.model import LanguageModel, Output
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS, Execution

Texts = str | Sequence[str]
Ids = Tensor | Sequence[int]


class TextModel(nn.Module):
    """A trained model that takes text or token ids.

    `TextModel` is an ordinary torch module: call it like a function; `.to("cuda")` and `.bfloat16()` work as usual.

    >>> model = td.load("runs/tsa")
    >>> out = model("def depth(token):")
    >>> out.logits.shape[:2]
    torch.Size([1, 17])
    >>> out.trace.totals().tokens
    17
    """

    def __init__(self, network: LanguageModel, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.network = network
        """The underlying `LanguageModel`."""
        self.tokenizer = tokenizer
        """Converts text to ids and back: `encode`, `decode`."""

    @classmethod
    def of(cls, run: Run, device: str = "auto", budget: float | None = None) -> "TextModel":
        """The model of a finished run; what `load` calls."""
        network = load_model(run, choose_device(device, "device"))
        if budget is not None:
            calibrate.set_budget(network, run, budget)
        return cls(network, tokenizer_of(run))

    if TYPE_CHECKING:

        def __call__(self, inputs: Texts | Ids, *, execution: Execution = "sparse") -> Output: ...

    @torch.no_grad()
    def forward(self, inputs: Texts | Ids, *, execution: Execution = "sparse") -> Output:
        """What a call does: compute an `Output`. By default, skipped blocks are not computed.

        `inputs` is a text, several texts (shorter ones are padded on the right, as `trace.valid` shows), a sequence of
        ids, or a tensor of ids `[batch, time]`.
        """
        if execution not in EXECUTIONS:
            raise UserError(f"execution is {execution!r}; expected one of {', '.join(EXECUTIONS)}")
        ids, valid = self.batch(inputs)
        return self.network(ids, execution=execution, **({} if valid.all() else {"valid": valid}))

    def batch(self, inputs: Texts | Ids) -> tuple[Tensor, Tensor]:
        """Ids `[batch, time]` on the model's device, and a mask that is False at padding."""
        device = self.network.norm.weight.device
        if isinstance(inputs, Tensor):
            ids = inputs.to(device) if inputs.dim() == 2 else inputs.to(device)[None]
            valid = torch.ones_like(ids, dtype=torch.bool)
        else:
            rows = self._rows(inputs)
            longest = max(map(len, rows), default=0)
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
            valid = torch.tensor([[n < len(row) for n in range(longest)] for row in rows], device=device)
        if not ids.numel() or not valid.any(1).all():
            raise UserError("a text is empty; give the model at least one token")
        low, high, size = int(ids.min()), int(ids.max()), self.network.config.vocab_size
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise UserError(f"token id {wrong} is out of range; expected 0 to {size - 1}, this model's vocabulary")
        return ids, valid

    def _rows(self, inputs: Texts | Sequence[int]) -> list[list[int]]:
        parts = [inputs] if isinstance(inputs, str) else list(inputs)
        texts = [part for part in parts if isinstance(part, str)]
        ids = [int(part) for part in parts if not isinstance(part, str)]
        if texts and ids:
            raise UserError("texts and ids are mixed; give a list of texts, or one list of ids")
        return [ids] if ids else [self.tokenizer.encode_prompt(text) for text in texts]
