"""Models of Hugging Face, in and out. Only what needs transformers imports it, where it is used."""
