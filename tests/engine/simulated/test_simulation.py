"""The simulator: a seed gives the same trace each time, and a mistake in the engine is found and made small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.loop import transfers
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.simulated.disasters import Disaster, Weather
from luminosity.engine.simulated.invariants import Broken
from luminosity.engine.simulated.simulation import Simulation
from luminosity.engine.simulated.virtual_time import Stuck
from tests.engine.simulated.scenarios import Scenario, scenario
from tests.engine.simulated.shapes import Shape
from tests.engine.simulated.shrinking import as_test, failure, shrunk

ProcessBundleResponse = beam_fn_api_pb2.ProcessBundleResponse
_KNOWN = Path(__file__).with_name("known_seeds.txt")
_TRACED = (3, 57, 1214, 5001)  # with crashes, streams and deaths among them
_NUMBERS = tuple((n, n % 7) for n in range(12))


def _known_seeds() -> list[int]:
    return [int(line) for line in _KNOWN.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("seed", _known_seeds())
def test_a_seed_that_has_failed_once(seed: int) -> None:
    scenario(seed).run()


def test_a_seed_gives_the_same_trace_in_another_process_with_another_hash_seed() -> None:
    program = f"""
from tests.engine.simulated.scenarios import scenario
for seed in {_TRACED}:
    print("trace", seed, scenario(seed).run().trace)
"""
    found: list[list[str]] = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        output = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        found.append([line for line in output.splitlines() if line.startswith("trace")])
    assert len(found[0]) == len(_TRACED)
    assert found[0] == found[1] == [f"trace {seed} {scenario(seed).run().trace}" for seed in _TRACED]


def test_disasters_happen_and_change_no_result() -> None:
    shape = Shape("create", 5, (("group", 3), ("count", 2)), is_durable=True)
    kinds = ("kill busy worker", "freeze worker", "raise", "kill at element", "kill driver", "lose power", "slow disk")
    disasters = tuple(Disaster(kind, 4 * number + 3, 0.5) for number, kind in enumerate(kinds))
    happened: Counter[str] = Counter()
    starts = 0
    for seed in range(6):
        outcome = Scenario(seed, shape, _NUMBERS, weather=Weather(disasters=disasters)).run()
        happened += outcome.disasters
        starts += outcome.starts
    assert {"kill driver", "lose power", "element raised", "worker killed by an element"} <= happened.keys()
    assert starts > 12


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("seed", [3, 4, 13])
def test_elements_of_a_key_stay_in_order_if_half_of_a_lost_bundle_is_split(seed: int, is_durable: bool) -> None:
    """What the first half gives back comes before the second half, which waits to be tried."""
    deaths = Disaster("kill at element", 10 + 3 * seed), Disaster("kill at element", 40 + 5 * (seed % 7))
    shape = Shape("stream", 100, (("position", 1),), is_durable=is_durable)
    numbers = tuple((number, number) for number in range(40))
    outcome = Scenario(seed, shape, numbers, weather=Weather(element_s=0.05, start_s=0.2, disasters=deaths)).run()
    assert outcome.disasters["worker killed by an element"] == 2


def test_elements_of_an_event_keep_their_order_if_their_bundle_is_retried_in_parts() -> None:
    events = ((29, 6), (9, 7), (48, 6), (25, 7), (44, 9))
    shape = Shape("test stream", 10, (("position", 1), ("ungroup", 3)), events=events)
    killing = Disaster("kill at element", 8)
    for seed in (77771124, 77771139, 77772272):
        weather = Weather(
            0.0, far_delay_s=0.5, far_part=0.1, element_s=0.0, start_s=0.0, block=50, disasters=(killing,)
        )
        outcome = Scenario(seed, shape, events, workers=3, weather=weather).run()
        assert outcome.disasters["worker killed by an element"] == 1


def test_results_count_once_if_the_disk_fails_at_the_end_of_a_run_without_a_checkpoint() -> None:
    shape = Shape("stream", 10, (("singleton", 3), ("dictionary", 2)), is_durable=True)
    data = ((31, 0), (27, 0), (13, 5), (9, 2), (5, 3), (2, 2))
    disasters = (Disaster("fail disk", 4, 0.888), Disaster("kill worker", 63), Disaster("stop driver", 78))
    weather = Weather(0.0, element_s=0.0, slow_part=0.05, start_s=0.0, block=2, disasters=disasters)
    outcome = Scenario(88880750, shape, data, workers=1, weather=weather, interval_s=1.0).run()
    assert outcome.disasters["fail disk"] == 1


def test_a_source_that_defers_itself_has_the_same_trace_each_time() -> None:
    shape = Shape("stream", 10, (("explode", 2),), is_durable=True)
    data = tuple((n, n // 2) for n in range(30))
    assert Scenario(1, shape, data).run().trace == Scenario(1, shape, data).run().trace


def test_a_timer_may_wait_as_long_as_the_clock_was_set_back() -> None:
    shape = Shape("create", None, (("batch", 2), ("constant", 2)))
    jumps = (Disaster("jump clock", 23, -2529), Disaster("jump clock", 26, -561))
    calm = Weather(0.0, element_s=0.0, start_s=0.0, block=50, disasters=jumps)
    assert Scenario(77770894, shape, ((24, 22),), workers=1, weather=calm).run().disasters["jump clock"] == 2


def test_late_elements_are_dropped_if_and_only_if_their_windows_have_expired() -> None:
    events = tuple((n, at) for n, at in enumerate((1, 2, 12, 3, 13, 4, 30, 2, 14, 31)))
    for n in (2, 3, 4):
        shape = Shape("test stream", 5, (("late", n), ("finalize", 2)), events=events)
        assert shape.expected(events).total() < len(events)
        Scenario(n, shape, events).run()


def test_a_worker_that_leaves_while_its_finalization_waits_for_the_disk_does_not_hold_up_the_end() -> None:
    shape = Shape("stream", 30, (("finalize", 3), ("flatten", 4)), is_durable=True)
    data = ((16, 25), (2, 25), (19, 28), (28, 26), (47, 26), (41, 27))
    disasters = (
        Disaster("kill driver", 15),
        Disaster("raise", 20, 1.993, 1),
        Disaster("kill driver", 23, 0.0, 1),
        Disaster("slow worker", 27, 9.992, 1),
        Disaster("leave", 29),
    )
    weather = Weather(
        far_delay_s=0.5, far_part=0.1, element_s=0.005, start_s=0.0, stall_part=0.05, block=50, disasters=disasters
    )
    outcome = Scenario(9075940213, shape, data, weather=weather, interval_s=1.0).run()
    assert outcome.disasters["leave"] == 1


def test_messages_of_a_stream_keep_their_order_when_they_arrive_at_the_same_time() -> None:
    """Times are absolute: to add to ``now`` what was subtracted from it before may give a little less."""
    events = ((15, 0), (15, 0), (4, 0))
    weather = Weather(0.0, far_delay_s=0.5, far_part=0.1, element_s=0.005, start_s=0.02, stall_part=0.05, block=2)
    outcome = Scenario(2554860804, Shape("test stream", 30, (("late", 4),), events=events), events, 1, weather).run()
    assert not outcome.disasters


def test_a_lost_block_is_found_and_its_scenario_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of bundles that were tried again are lost."""
    commit = transfers.commit

    def forgetful(bundle: Bundle, attempt: Attempt, response: ProcessBundleResponse, parts: RunParts) -> None:
        if bundle.failures:
            attempt.drop_outputs()
        commit(bundle, attempt, response, parts)

    monkeypatch.setattr("luminosity.engine.loop.scheduler.commit", forgetful)
    numbers = tuple((n, n) for n in range(20))
    disasters = (Disaster("jump clock", 2, 60), Disaster("raise", 3, 1), Disaster("freeze worker", 9, 0.2))
    found = Scenario(
        7,
        Shape("create", 10, (("map", 2), ("reshuffle", 2), ("combine", 3))),
        numbers,
        weather=Weather(disasters=disasters),
    )
    assert failure(found) == Broken.__name__
    small = shrunk(found)
    assert [disaster.kind for disaster in small.weather.disasters] == ["raise"]
    assert len(small.data) <= 2
    assert len(small.shape.operations) <= 1
    assert failure(small) == Broken.__name__
    assert "Disaster(kind='raise'" in as_test(small)


def test_what_waits_for_nothing_is_told() -> None:
    with pytest.raises(Stuck):
        Simulation(1).wait(lambda: False, None)


def test_tasks_take_turns_in_the_order_of_their_times() -> None:
    simulation = Simulation(1)
    seen: list[tuple[str, float]] = []

    def count(name: str, step: float) -> None:
        for _ in range(3):
            simulation.pause(step)
            seen.append((name, round(simulation.now, 3)))

    tasks = [
        simulation.start(lambda name=name, step=step: count(name, step)) for name, step in (("a", 0.2), ("b", 0.35))
    ]
    for task in tasks:
        task.join()
    assert seen == [("a", 0.2), ("b", 0.35), ("a", 0.4), ("a", 0.6), ("b", 0.7), ("b", 1.05)]
    assert not simulation.tasks
