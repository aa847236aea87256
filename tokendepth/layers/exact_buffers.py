"""Buffers that must not be rounded when a model's weights are."""

from torch import nn


class ExactBuffers(nn.Module):
    """Keeps its buffers' dtype when the weights are cast: a threshold or frequency would change in bfloat16."""

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != exact[name].dtype:
                setattr(self, name, exact[name].to(buffer.device))
        return self
