"""Dead letters of a run that is killed between a letter and the commit of its bundle: none is lost, all are told."""

from __future__ import annotations

import json
from pathlib import Path

from tests.durability import jobs
from tests.durability.kills import Job
from tests.marks import notes


def test_no_letter_is_lost_and_a_repeated_one_has_the_same_id(tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    with Job("failing", tmp_path, "--checkpoint_interval=100ms", f"--dead_letters={folder}") as job:
        for number in (1, 2):
            job.start(crash=f"before the commit of letters:{number}")
            assert job.wait() == 1, job.output[-5_000:]
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
        output = job.output
    letters = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    bad = [*range(jobs.FAILING_KEY, jobs.ELEMENTS, jobs.FAILING_EVERY)]
    by_id = {letter["id"]: int(letter["element"]) for letter in letters}
    assert sorted(by_id.values()) == bad
    assert len(letters) > len(bad), "the bundle was repeated"
    assert f"{len(bad)} elements were passed by" in output, "the counter is part of the checkpoint"
    keys = {int(line.split()[0]) for line in notes(tmp_path / "result")}
    assert keys == {*range(jobs.KEYS)} - {jobs.FAILING_KEY}
