"""How threads wait for each other; it must be set before PyTorch is imported."""

import os


def share_cores() -> None:
    """Let threads that wait for each other sleep early, unless the user has decided otherwise.

    By default they spin: with one other busy program on two cores, training then takes two to five times as long, and
    a small model generates or evaluates even slower. On an idle machine, sleeping costs about 5% of the speed of
    training a small model and 15% to 25% of that of generating. The setting affects only GNU's library. `bench` and
    `serve`, which should have a machine to themselves, do without it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
