"""The script of a server with OpenAI's batch API: files of requests go in, files of answers come out."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable
from typing import Any

from tests.inference.handlers.model_server import Said, Seen

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


def completion(text: str, finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"object": "chat.completion", "model": "talker-2", "choices": [choice], "usage": USAGE}


class BatchServer:
    """Answers each request with its last message in capitals when its batch is finished.

    ``fail`` returns the status and body of a request that fails in its batch, or None.
    """

    def __init__(self, polls: int = 1, fail: Callable[[str], tuple[int, Any] | None] = lambda text: None) -> None:
        self.polls = polls
        """How often a batch is asked about before it has ended."""
        self.fail = fail
        self.is_held = False
        """Whether no batch ends."""
        self.breaks_off_after_making = 0
        """How many answers to the making of a batch are lost."""
        self.answered: collections.Counter[str] = collections.Counter()
        """How often each text was answered: what it was paid for."""
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.asked: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Said:
        with self._lock:
            path = seen.path.partition("?")[0]
            parts = path.removeprefix("/v1/").split("/")
            if seen.method == "POST" and parts == ["files"]:
                return self._upload(seen)
            if seen.method == "POST" and parts == ["batches"]:
                return self._make(seen.json)
            if parts[0] == "batches" and len(parts) == 1:
                return Said({"data": list(self.batches.values()), "has_more": False})
            if parts[0] == "batches" and parts[1] in self.batches:
                return Said(self._look(parts[1]))
            if parts[0] == "files" and parts[1] in self.files:
                return Said(self.files[parts[1]])
            return Said({"error": {"message": f"no {path}"}}, 404)

    def _upload(self, seen: Seen) -> Said:
        boundary = seen.headers["Content-Type"].partition("boundary=")[2].encode()
        purpose, file = (part.partition(b"\r\n\r\n")[2] for part in seen.body.split(b"--" + boundary)[1:3])
        assert purpose == b"batch\r\n"
        name = f"file-{len(self.files)}"
        self.files[name] = file.removesuffix(b"\r\n")
        return Said({"id": name, "object": "file"})

    def _make(self, asked: dict[str, Any]) -> Said:
        assert (asked["endpoint"], asked["completion_window"]) == ("/v1/chat/completions", "24h")
        name = f"batch_{len(self.batches)}"
        self.batches[name] = {"id": name, "status": "in_progress", **asked}
        made = Said(self.batches[name])
        if self.breaks_off_after_making:
            self.breaks_off_after_making -= 1
            made.breaks_off = True
        return made

    def _look(self, name: str) -> dict[str, Any]:
        batch = self.batches[name]
        self.asked[name] += 1
        if batch["status"] == "in_progress" and not self.is_held and self.asked[name] >= self.polls:
            self._finish(batch)
        return batch

    def _finish(self, batch: dict[str, Any]) -> None:
        good, bad = list[bytes](), list[bytes]()
        for line in self.files[batch["input_file_id"]].splitlines():
            asked = json.loads(line)
            text = asked["body"]["messages"][-1]["content"]
            failure = self.fail(text)
            self.answered[text] += failure is None or failure[0] == 200
            status, body = failure or (200, completion(text.upper()))
            answer = {"custom_id": asked["custom_id"], "error": None}
            if status:
                answer["response"] = {"status_code": status, "body": body}
            else:
                answer |= {"response": None, "error": {"code": "batch_expired", "message": "it took too long"}}
            (good if status == 200 else bad).append(json.dumps(answer).encode())
        for key, lines in (("output_file_id", good), ("error_file_id", bad)):
            if lines:
                batch[key] = f"file-{len(self.files)}"
                self.files[batch[key]] = b"\n".join(reversed(lines)) + b"\n"
        batch["status"] = "completed"
