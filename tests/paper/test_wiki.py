"""Plain text from wiki markup."""

import pytest

from paper.wiki import plain, wiki_text

LONG = "It is a long article about something. " * 20


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Depth''' is [[measure|measured]] in [[layer]]s.", "Depth is measured in layers."),
        ("A {{cite {{web|b}} c}}word.<!-- no --> &amp;quot;So&amp;quot;", 'A word. "So"'),
        ("[[Image:a.png|thumb|of [[x]]]]Text[http://a.b c]", "Textc"),
        ("== Head ==\n* item\n{| border\n| cell\n|}", "Head\nitem"),
        ("x <math>a^2</math>y<br/>z", "x yz"),
    ],
)
def test_markup_is_taken_out(markup, text):
    assert plain(markup) == text


def test_redirections_and_stubs_are_left_out_and_enough_is_enough():
    articles = ["#REDIRECT [[x]]" + LONG, "short", "One. " + LONG, "Two. " + LONG, "Three. " + LONG]
    dump = "".join(f'<text xml:space="preserve">{article}</text>' for article in articles)
    assert wiki_text(dump, enough=len(LONG) + 10) == f"One. {LONG.strip()}\n\nTwo. {LONG.strip()}\n"
