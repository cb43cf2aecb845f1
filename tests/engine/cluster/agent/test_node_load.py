"""How busy a node is."""

from __future__ import annotations

from luminosity.engine.cluster.agent.node_load import NodeLoad


def test_a_sample_has_the_memory_and_after_the_first_one_the_load() -> None:
    load = NodeLoad("a")
    try:
        first, second = load.sample(), load.sample()
        while second.cpu_utilization is None:  # no tick of the clock has passed yet
            second = load.sample()
    finally:
        load.close()
    assert first.cpu_utilization is None
    assert 0 <= second.cpu_utilization <= 1
    assert 0 < first.ram_used < first.ram_total
    assert first.to_json()["node_id"] == "a"
