"""Which tokens get the depth: `analyse` for finished runs over a split, `depth_by` for one trace.

>>> text = "def depth(token): hello world"
>>> trace = td.load("runs/tsa")(text).trace
>>> kinds = [["letter" if char.isalpha() else "other" for char in text]]
>>> table = td.analysis.depth_by(trace, {"kind": kinds, "position": [list(range(len(text)))]})
>>> [(row["group"], row["tokens"]) for row in table["kind"]["groups"]]
[('letter', 23), ('other', 6)]
>>> sorted(table["position"])
['groups', 'rank_correlation', 'rank_correlation_per_site']
"""

from tokendepth.analysis.study import analyse
from tokendepth.analysis.table import depth_by

__all__ = ["analyse", "depth_by"]
