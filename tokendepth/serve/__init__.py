"""An OpenAI-compatible HTTP server for a trained run."""
