"""Import checkpoints as finished runs. GGUF files need transformers; safetensors need no other package."""
