"""A command that works long says so."""

import io
import sys
import threading

from tokendepth.cli.progress import working


def test_a_command_that_works_long_gives_signs_of_life_until_it_is_done(monkeypatch):
    class Screen(io.StringIO):
        reminded = threading.Event()

        def write(self, text):
            if "still at it" in text:
                self.reminded.set()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr("tokendepth.cli.progress.EVERY", 0.01)
    before = threading.active_count()
    with working("drawing"):
        assert screen.reminded.wait(30)
    assert screen.getvalue().startswith("drawing ...\n    still at it after 0 s\n")
    assert threading.active_count() == before
