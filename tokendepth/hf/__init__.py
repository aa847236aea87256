"""Hugging Face transformers integration. Importing this registers our classes with its Auto classes."""

from tokendepth.errors import UserError

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UserError("tokendepth.hf needs the package transformers; pip install 'tokendepth[hf]'") from None

from tokendepth.hf.cache import DepthCache
from tokendepth.hf.configuration import TokenDepthConfig
from tokendepth.hf.modeling import TokenDepthForCausalLM

__all__ = ["DepthCache", "TokenDepthConfig", "TokenDepthForCausalLM"]

transformers.AutoConfig.register(TokenDepthConfig.model_type, TokenDepthConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(TokenDepthConfig, TokenDepthForCausalLM, exist_ok=True)
