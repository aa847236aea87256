"""The tokenizer of an imported model, with the tokens that begin every text and those that end a generated one."""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from tokendepth.data.bpe import BPETokenizer, check_characters, tokenizers_library
from tokendepth.errors import UserError


@dataclass(frozen=True)
class ImportedTokenizer(BPETokenizer):
    begins: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    chat_template: str | None = None
    """Jinja template that turns a conversation into one text; kept for serving the model."""
    kind: ClassVar[str] = "imported"

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "ImportedTokenizer":
        """Inverse of `to_dict`. The UserError names only the fault."""
        plain, template = BPETokenizer.from_tree(tree["tokenizer"]), tree["chat_template"]
        for name in ("begins", "stops"):
            ids = tree[name]
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < plain.vocab_size for i in ids):
                raise UserError(f"its {name} is {ids!r:.40}; expected a list of its ids")
        if not isinstance(template, str | None):
            raise UserError(f"its chat_template is {template!r:.40}; expected text")
        return cls(plain.text, tuple(tree["begins"]), tuple(tree["stops"]), template)

    def to_dict(self) -> dict[str, Any]:
        own = {"begins": list(self.begins), "stops": list(self.stops), "chat_template": self.chat_template}
        return {**super().to_dict(), **own}

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def encode_prompt(self, text: str) -> list[int]:
        """As in transformers: with the tokens that begin every text, and with special tokens that are spelled out."""
        check_characters(text)
        return [*self.begins, *self._of_prompts.encode(text, add_special_tokens=False).ids]

    @functools.cached_property
    def _of_prompts(self) -> Any:
        """A second library object, because whether "</s>" is parsed as a special token is a setting of the object."""
        parsed = tokenizers_library().Tokenizer.from_str(self._library.to_str())
        parsed.encode_special_tokens = False
        return parsed
