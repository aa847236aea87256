"""How threads wait for each other: to be decided before PyTorch is imported."""

import os


def share_cores() -> None:
    """Let threads that wait for each other sleep soon, where the user has not decided.

    By default they spin, so that beside one other busy program a training on two cores takes twice to five times as
    long. Sleeping costs a small model a twentieth of its speed on a quiet machine. Only GNU's library is asked.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
