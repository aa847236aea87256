"""A trained run behind an HTTP server that speaks the OpenAI API."""
