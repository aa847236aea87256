"""A server with default options: who can reach it, and what it answers to hostile strings."""

import ast
import json
import re
from pathlib import Path

import tokendepth
from benchmarks.faults import servers
from benchmarks.faults.outcome import Outcome, Tell
from benchmarks.faults.servers import Answer, Served, asking

HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>", "</script><script>alert(1)",
    "\"><script>alert(1)</script>", "'><img src=x onerror=alert(1)>", "<body onload=alert(1)>", "<iframe src=//evil>",
    "<a href=javascript:alert(1)>x</a>", "javascript:alert(1)", "data:text/html,<script>alert(1)</script>",
    "<meta http-equiv=refresh content=0;url=//evil>", "<link rel=stylesheet href=//evil>", "<base href=//evil/>",
    "<form action=//evil><input>", "<object data=//evil>", "<embed src=//evil>", "<math><mi xlink:href=//evil>",
    "<style>@import '//evil'</style>", "<!--<script>alert(1)//-->", "<![CDATA[<script>alert(1)</script>]]>",
    "<html><body>x</body></html>", "<!DOCTYPE html><p>x", "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\\u003cscript\\u003e", "%3Cscript%3Ealert(1)%3C/script%3E", "{{7*7}}", "{% for x in y %}{% endfor %}", "${7*7}",
    "#{7*7}", "<%= 7*7 %>", "{{''.__class__.__mro__}}", "%s%s%s%n", "{0.__globals__}", "'; DROP TABLE users; --",
    "\" OR 1=1 --", "$(id)", "`id`", "; cat /etc/passwd", "../../../../etc/passwd", "file:///etc/passwd", "http://169.254.169.254/latest",
    "x\r\nSet-Cookie: a=b", "x\nHTTP/1.1 200 OK\n\n<html>", "\x1b]0;title\x07\x1b[31m", "\u202egnp.exe", "\ufeff<html>",
    "\x00<script>", "\ud800<script>", "<script>" * 500,
)  # fmt: skip
"""Fifty strings that anything but a JSON parser might execute."""
ORIGIN = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
ADDRESSES = (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health"))


def server_defaults(folder: Path, count: int, tell: Tell) -> Outcome:
    """The first `count` of the hostile strings, each in every place; and how it listens."""
    outcome = Outcome()
    with servers.serving(servers.run_to_serve(folder)) as served:
        for check in (_listens_to_this_machine, _no_other_origin, _no_other_name):
            with outcome.attempt(check.__name__):
                check(served, outcome)
        with outcome.attempt("code of others"):
            outcome.check(not (found := _trusting()), f"code of a model's author would be executed: {found}")
        for number, text in enumerate(HOSTILE[:count]):
            for place, answer in _places(served, text):
                with outcome.attempt(place):
                    _check_type(outcome, f"{place} of {text[:40]!r}", answer)
            tell(number + 1, count)
    return outcome


def _listens_to_this_machine(served: Served, outcome: Outcome) -> None:
    """By the kernel's own list: every socket that listens at this port does so at 127.0.0.1."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path("/proc/net") / name)]
    at = [local.rpartition(":")[0] for _, local, _, state, *_ in rows if state == "0A" and _port(local) == served.port]
    outcome.check(at == ["0100007F"], f"it listens at {at}")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []


def _port(local: str) -> int:
    return int(local.rpartition(":")[2], 16)


def _no_other_origin(served: Served, outcome: Outcome) -> None:
    """A page from elsewhere gets no leave to read an answer, and cannot ask without asking for leave first."""
    for method, path in ADDRESSES:
        for how in (method, "OPTIONS"):
            answer = served.ask(how, path, asking(max_tokens=1) if how == "POST" else None, ORIGIN)
            allowed = [name for name in answer.headers if name.startswith("access-control")]
            outcome.check(not allowed, f"{how} {path}: {allowed}")
    plain = served.ask("POST", "/v1/completions", asking(max_tokens=1), {"Content-Type": "text/plain"})
    outcome.check(plain.status == 415, f"a form of a page is answered {plain.status}")


def _no_other_name(served: Served, outcome: Outcome) -> None:
    """A name of the web that was given this machine's address."""
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example", "localhost.evil.example"):
        answer = served.ask("POST", "/v1/completions", asking(max_tokens=1), {"Host": host})
        outcome.check(answer.status == 403, f"it answers {answer.status} to the name {host}")
    for host in ("localhost", f"127.0.0.1:{served.port}", "[::1]:80"):
        answer = served.ask("GET", "/v1/models", None, {"Host": host})
        outcome.check(answer.status == 200, f"it answers {answer.status} to the name {host}")


def _trusting(package: Path = Path(tokendepth.__file__).parent) -> list[str]:
    """Calls in the package that pass trust_remote_code."""
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append(f"{path.relative_to(package)}:{node.value.lineno}")
    return found


def _places(served: Served, text: str) -> list[tuple[str, Answer]]:
    """Wherever a request can bring a string that comes back: in a message, a path, a text that is continued."""
    in_path = "/" + re.sub(r"[^!-~]", "", text)[:200].replace("#", "%23").lstrip("/")
    bodies = {
        "model": asking(model=text),
        "prompt": asking(prompt=text, max_tokens=1),
        "stop": asking(stop=[text[:900]], max_tokens=1),
        "user": asking(user=text, max_tokens=1, stream=True),
        "temperature": asking(temperature=text),
        "a field": asking(**{text: 1}),
        "logit_bias": asking(logit_bias={text: 1}),
    }
    found = [(place, served.ask("POST", "/v1/completions", body)) for place, body in bodies.items()]
    messages = {"model": servers.NAME, "messages": [{"role": text, "content": text}]}
    found.append(("role", served.ask("POST", "/v1/chat/completions", messages)))
    found += [("path", served.ask("GET", path)) for path in (in_path, f"/v1/models{in_path}")]
    return found


def _check_type(outcome: Outcome, name: str, answer: Answer) -> None:
    kind = answer.headers.get("content-type", "")
    stream = kind.startswith("text/event-stream") and answer.status == 200
    outcome.check(stream or kind == "application/json", f"{name}: the type of the answer is {kind!r}")
    outcome.check(answer.headers.get("x-content-type-options") == "nosniff", f"{name}: its type may be guessed")
    outcome.check(answer.status < 500, f"{name}: {answer.status}")
    outcome.check("set-cookie" not in answer.headers, f"{name}: a header was smuggled in")
    if not stream:
        json.loads(answer.content)
