"""How threads wait for each other; it must be set before PyTorch is imported."""

import os


def share_cores() -> None:
    """Let threads that wait for each other sleep early, unless the user has decided otherwise.

    By default they spin: with one other busy program on two cores, training then takes two to five times as long.
    Sleeping costs a small model about 5% of its speed on an idle machine. The setting affects only GNU's library.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
