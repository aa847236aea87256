"""A conversation as one prompt, by the template that came with the model's tokenizer."""

from typing import Any

from tokendepth.data import Tokenizer
from tokendepth.errors import one_line
from tokendepth.serve.asked import Message
from tokendepth.serve.errors import Refusal


def prompt_ids(tokenizer: Tokenizer, messages: tuple[Message, ...]) -> list[int]:
    """The template spells out special tokens, also what a text begins with; so nothing is put before it."""
    if tokenizer.chat_template is None:
        raise Refusal(400, "this model has no chat template; send its prompt to /v1/completions", param="messages")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Complaint(TemplateError):
        """What the template itself raises, such as about roles that do not alternate."""

    def raise_exception(message: object) -> None:
        raise Complaint(str(message))

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    said: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in messages]
    special = {"bos_token": tokenizer.decode(tokenizer.begins), "eos_token": tokenizer.decode(tokenizer.stops[:1])}
    try:
        text = environment.from_string(tokenizer.chat_template).render(
            messages=said, add_generation_prompt=True, **special
        )
    except Complaint as error:
        message = f"the model's chat template refuses these messages: {error}"
        raise Refusal(400, one_line(message), param="messages") from None
    return tokenizer.encode_prompt(text)[len(tokenizer.begins) :]
