"""A vLLM plugin: vLLM finds `register` by the entry point in pyproject.toml, in every process that it starts."""


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("RoutedLlamaForCausalLM", "tokendepth_vllm.model:RoutedLlamaForCausalLM")
