"""Numbers of a model that must not be rounded with its weights."""

from torch import nn


class ExactBuffers(nn.Module):
    """Buffers keep their precision when weights are rounded: a threshold or a frequency in bfloat16 is another one."""

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != exact[name].dtype:
                setattr(self, name, exact[name].to(buffer.device))
        return self
