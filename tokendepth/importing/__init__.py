"""Checkpoints of others as finished runs. Safetensors need no other package, GGUF files need transformers."""
