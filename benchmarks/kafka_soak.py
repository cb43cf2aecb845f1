"""Runs Kafka → Map → Kafka for minutes at a steady rate, and shows whether memory grows and the pipeline keeps up.

Each minute you get a line: the resident memory of the runner and of its workers, in brackets the same with pages that
several processes share counted in parts (PSS), the memory of the broker, how many records were written to the first
topic and to the second, and the difference, which is the lag. The last lines say how much resident memory grew after
the first two minutes, and how many records are missing at the end.

    python benchmarks/kafka_soak.py --minutes 20
    python benchmarks/kafka_soak.py --minutes 2 --every 15    # a try

With --check, the exit code is 1 if memory grew or a record is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

import _kafka
import psutil

SETTLED_AFTER_S = 120.0  # until then, caches fill and workers start
MOST_GROWTH_MB = 20.0  # of the runner and all its workers
DRAIN_S = 10.0  # for the last records to arrive
LINGER_MS = 50.0  # of the producer: the broker needs memory for each batch


@dataclass(frozen=True)
class Sample:
    """Memory in MB, and records, at one moment."""

    seconds: float
    runner_mb: float
    workers_mb: float
    pss_mb: float
    workers: int
    broker_mb: float
    sent: int
    arrived: int

    @property
    def pipeline_mb(self) -> float:
        return self.runner_mb + self.workers_mb

    def line(self) -> str:
        return (
            f"{self.seconds:6.0f} s  runner {self.runner_mb:6.1f} MB  {self.workers} workers {self.workers_mb:6.1f} MB "
            f"(PSS {self.pss_mb:6.1f} MB)  broker {self.broker_mb:6.1f} MB  sent {self.sent:9,}  "
            f"arrived {self.arrived:9,}  lag {self.sent - self.arrived:6,}  load {os.getloadavg()[0]:.1f}"
        )


def take(began_at: float, broker: _kafka.BrokerProcess, sent: _kafka.Ends, arrived: _kafka.Ends) -> Sample:
    runner = psutil.Process().memory_full_info()
    workers = [worker.memory_full_info() for worker in _kafka.children()]  # and the process that forks them
    done = arrived.count()  # first, so that a record in between does not count as arrived and not sent
    return Sample(
        time.monotonic() - began_at,
        runner.rss / 1e6,
        sum(each.rss for each in workers) / 1e6,
        sum(each.pss for each in [runner, *workers]) / 1e6,
        len(workers),
        psutil.Process(broker.pid).memory_info().rss / 1e6,
        sent.count(),
        done,
    )


def verdict(samples: list[Sample], missing: int) -> bool:
    """Print how much memory grew and what is missing; return whether both are within their bounds."""
    settled = [sample for sample in samples if sample.seconds >= SETTLED_AFTER_S]
    is_good = missing == 0
    print(f"{'ok  ' if is_good else 'FAIL'} {missing:,} records have not arrived {DRAIN_S:.0f} s after the last")
    print(f"     largest lag: {max(sample.sent - sample.arrived for sample in samples):,} records")
    if len(settled) < 2:
        print(f"     too short to judge memory: the first {SETTLED_AFTER_S:.0f} s do not count")
        return is_good
    first, last = settled[0], settled[-1]
    grown = last.pipeline_mb - first.pipeline_mb
    is_bounded = grown <= MOST_GROWTH_MB
    most = max(sample.pipeline_mb for sample in settled) - first.pipeline_mb
    print(
        f"{'ok  ' if is_bounded else 'FAIL'} grew by {grown:.1f} MB (runner {last.runner_mb - first.runner_mb:.1f}, "
        f"workers {last.workers_mb - first.workers_mb:.1f}) after {SETTLED_AFTER_S:.0f} s, by {most:.1f} MB at most; "
        f"allowed are {MOST_GROWTH_MB:.0f} MB"
    )
    return is_good and is_bounded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to run (default: 2)")
    parser.add_argument("--rate", type=float, default=2000.0, help="records a second (default: 2000)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines (default: 60)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if memory grew or a record is missing")
    own = parser.parse_args()
    samples: list[Sample] = []
    with _kafka.BrokerProcess() as broker:
        result = _kafka.stream(broker.servers, _kafka.upper)
        sent, arrived = _kafka.Ends(broker.servers, "in"), _kafka.Ends(broker.servers, "out")
        began_at = time.monotonic()
        with _kafka.ProducerProcess(broker.servers, own.rate, LINGER_MS) as producer:
            try:
                while (left := 60 * own.minutes - (time.monotonic() - began_at)) > 0:
                    if result.wait_until_finish(duration=1000 * min(own.every, left)) is not None:
                        print(f"FAIL the run ended: {result.state}")
                        return 1
                    if not producer.is_alive:
                        print("FAIL the producer ended")
                        return 1
                    samples.append(take(began_at, broker, sent, arrived))
                    print(samples[-1].line(), flush=True)
            except KeyboardInterrupt:
                print("interrupted")
        deadline = time.monotonic() + DRAIN_S
        while (missing := sent.count() - arrived.count()) and time.monotonic() < deadline:
            time.sleep(0.1)
        sent.close()
        arrived.close()
        result.cancel()
    return 0 if verdict(samples, missing) or not own.check else 1


if __name__ == "__main__":
    sys.exit(main())
