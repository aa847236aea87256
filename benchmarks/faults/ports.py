"""A port that stays free until the process that is given it listens there."""

import random
import socket

RANGE = range(20_001, 32_768)
"""Above those that Ray gives to its workers, and below those that Linux gives away."""


def free_port() -> int:
    dice = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", dice.choice(RANGE)))
            except OSError:
                continue
            return probe.getsockname()[1]
