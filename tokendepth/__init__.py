"""tokendepth trains, measures and serves transformers in which every token gets only the depth it needs.

Nothing is imported here, so `import tokendepth.config` stays free of torch.
"""

__version__ = "0.1.0"
