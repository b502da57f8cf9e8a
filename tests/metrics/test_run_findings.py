"""Findings of a run: which layers, ranks and losses are unusual, in words."""

from moe_trainer.metrics.run_data import RunData
from moe_trainer.metrics.run_findings import find_problems, worst_layers


def make_routing(iteration, dead, loads=(1.2, 1.1), entropy=(0.99, 0.98)):
    return {
        "iteration": iteration,
        "layers": [2, 43],
        "tokens_per_expert": [[1] * 16, [1] * 16],
        "dead_experts": [0, dead],
        "load_max_over_mean": list(loads),
        "load_entropy": list(entropy),
        "drop_rate": [0.0, 0.0],
    }


def test_collapsed_layer_is_named_with_the_iteration_since_when():
    routing = [make_routing(at, dead=8 if at in (100, 390, 400) else 0) for at in range(10, 401, 10)]
    (finding,) = worst_layers(routing)
    assert finding == {
        "severity": "bad",
        "layer": 43,
        "metric": "dead_experts",
        "text": "layer 43: 8 of 16 experts have received no token since iteration 390",
    }
    assert worst_layers([make_routing(10, 0)]) == worst_layers([]) == []


def test_worst_layer_comes_first():
    routing = [make_routing(10, 0, loads=(12.0, 4.0), entropy=(0.5, 0.9))]
    first, second = worst_layers(routing)
    assert (first["layer"], first["severity"]) == (2, "bad") and (second["layer"], second["severity"]) == (43, "warn")
    assert "12.0 times the mean load" in first["text"] and "entropy is 0.50" in first["text"]


def test_rank_is_slow_if_it_is_in_several_records():
    slow = [{"iteration": at, "ranks": [100.0, 101.0, 99.0, 180.0]} for at in (1, 2, 3)]
    (finding,) = find_problems([], [], slow)
    assert finding["card"] == "ranks" and finding["text"].startswith("rank 3 computes 1.8 times as long as the others")
    (finding,) = find_problems([], [], [{"iteration": at, "ranks": [100.0, 130.0]} for at in (1, 2)])
    assert finding["text"].startswith("rank 1 computes 1.3 times")
    once = [*slow[:1], *({"iteration": at, "ranks": [100.0] * 4} for at in range(2, 10))]
    assert [each["severity"] for each in find_problems([{"iteration": 1}], [], once)] == ["ok"]


def test_slow_rank_has_the_iteration_since_when():
    """One record in which it is not slow is noise; after two it was slow earlier."""
    ranks = [
        {"iteration": at, "ranks": [100.0, 170.0 if at == 5 or (at > 40 and at != 60) else 101.0]}
        for at in range(5, 101, 5)
    ]
    (finding,) = find_problems([], [], ranks)
    assert finding["text"] == "rank 1 computes 1.6 times as long as the others since iteration 45; they wait for it"


def test_slow_rank_is_compared_with_what_routing_sends_to_it():
    ranks = [{"iteration": at, "ranks": [100.0, 170.0]} for at in (1, 2)]
    routing = [make_routing(at, 0) for at in (1, 2)]
    even, skewed = [1] * 16, [1] * 8 + [3] * 8
    for loads, words in (
        ([skewed, skewed], "Routing may explain it: the busiest expert-parallel rank receives 1.5 times the mean"),
        ([skewed, skewed[::-1]], "Routing does not explain it: the busiest expert-parallel rank receives 1.0 times"),
        ([even, even], "Routing does not explain it"),
    ):
        for each in routing:
            each["tokens_per_expert"] = loads
        (finding,) = find_problems([], routing, ranks, num_experts=16, world_size=2, expert_ranks=2)
        assert words in finding["text"]
    (finding,) = find_problems([], routing, ranks, num_experts=16, world_size=2)
    assert "Routing" not in finding["text"]


def test_what_was_not_recorded_is_named_with_its_flag():
    (finding,) = find_problems([{"iteration": 1}], [], [], num_experts=8, world_size=2)
    assert finding["text"] == (
        "nothing unusual in the loss; not recorded: routing (--moe-per-layer-logging) and compute times of the ranks "
        "(--log-straggler)"
    )
    (finding,) = find_problems([{"iteration": 1}], [], [])
    assert finding["text"] == "nothing unusual in the loss"


def test_findings_of_a_run_use_its_mapping_and_model():
    run = RunData("run", "metrics.jsonl")
    head = {"model": {"num_experts": 16}, "mapping": {"world_size": 2, "ep": 2}}
    run.take({"iteration": 1, "run": head})
    assert "--moe-per-layer-logging" in (text := run.as_page()["findings"][0]["text"]) and "--log-straggler" in text
    health = {"rank_max_over_mean": [1.0, 1.0], "straggler_cost": 0.0}
    health |= make_routing(0, 0)
    del health["iteration"]
    for at in (2, 3):
        run.take({"iteration": at, "routing": health, "own_time_ms": {"ranks": [1.0, 2.0]}})
    (finding,) = run.as_page()["findings"]
    assert "Routing does not explain it" in finding["text"]
    odd = RunData("odd", "metrics.jsonl")
    odd.take({"iteration": 1, "run": {"model": [], "mapping": {"world_size": "two", "ep": -1}}})
    assert odd.as_page()["findings"][0]["text"] == "nothing unusual in the loss"


def test_rising_and_nan_losses_are_found():
    falling = [{"iteration": at, "lm loss": 5 - at / 50} for at in range(1, 101)]
    assert [each["severity"] for each in find_problems(falling, [], [])] == ["ok"]
    rising = [*falling, *({"iteration": at, "lm loss": 3 + (at - 100) / 50} for at in range(101, 161))]
    (finding,) = find_problems(rising, [], [])
    assert finding["severity"] == "warn" and "above its lowest level, near iteration 9" in finding["text"]
    broken = [*falling[:-1], {"iteration": 100, "lm loss": None, "nan_iterations": 2}]
    assert find_problems(broken, [], [])[0] == {
        "severity": "bad",
        "card": "loss",
        "text": "2 of the newest iterations had a NaN loss",
    }


def test_thresholds_of_findings():
    """Drops of more than a percent, low entropy, a loss that rose by a tenth, and a rank that needs a fifth more time."""
    record = make_routing(10, 0, entropy=(0.79, 0.81)) | {"drop_rate": [0.01, 0.02]}
    dropped, uneven = sorted(worst_layers([record]), key=lambda each: -each["layer"])
    assert dropped["text"] == "layer 43: 2 % of the chosen tokens are dropped"
    assert uneven["text"] == "layer 2: the normalized load entropy is 0.79"
    for rise, expected in ((0.09, "ok"), (0.15, "warn")):
        losses = [{"iteration": at, "lm loss": 2.0 + (rise if at > 60 else 0.0)} for at in range(1, 101)]
        assert [each["severity"] for each in find_problems(losses, [], [])] == [expected]
    for slow, expected in ((119.0, "ok"), (121.0, "bad")):
        times = [{"iteration": at, "ranks": [100.0, slow, 100.0]} for at in range(5)]
        assert find_problems([{"iteration": 1}], [], times)[0]["severity"] == expected
