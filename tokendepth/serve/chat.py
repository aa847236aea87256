"""Turn chat messages into a prompt with the chat template of the model's tokenizer."""

from typing import Any

from tokendepth.data import Tokenizer
from tokendepth.errors import one_line
from tokendepth.serve.asked import Message
from tokendepth.serve.errors import Refusal


def prompt_ids(tokenizer: Tokenizer, messages: tuple[Message, ...]) -> list[int]:
    """The template itself writes special tokens such as BOS, so none are added."""
    if tokenizer.chat_template is None:
        raise Refusal(400, "this model has no chat template; use /v1/completions instead", param="messages")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Complaint(TemplateError):
        """Raised by the template itself, for example if roles do not alternate."""

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
        message = f"the model's chat template rejects these messages: {error}"
        raise Refusal(400, one_line(message), param="messages") from None
    return tokenizer.encode_prompt(text)[len(tokenizer.begins) :]
