"""The paper, reproduced, and every method, compared: many runs and what they say together. `python -m paper --help`."""
