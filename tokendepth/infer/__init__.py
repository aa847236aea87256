"""A trained model at work: text, the fastest form to run it in, and when to skip."""
