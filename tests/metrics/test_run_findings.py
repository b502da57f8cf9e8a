"""Findings of a run: which layers, ranks and losses are unusual, in words."""

import time

from moe_trainer.metrics.run_data import RunData
from moe_trainer.metrics.run_findings import RunSizes, find_problems, worst_layers


def make_routing(iteration, dead=(), loads=(1.2, 1.1), entropy=(0.99, 0.98)):
    """Routing of two layers; `dead`: experts of the second one without tokens."""
    return {
        "iteration": iteration,
        "layers": [2, 43],
        "tokens_per_expert": [[1] * 16, [int(expert not in dead) for expert in range(16)]],
        "dead_experts": [0, len(dead)],
        "load_max_over_mean": list(loads),
        "load_entropy": list(entropy),
        "drop_rate": [0.0, 0.0],
    }


def test_collapsed_layer_is_named_with_the_iteration_since_when():
    late = range(8, 16)
    routing = [make_routing(at, late if at in (100, 380, 390, 400) else ()) for at in range(10, 401, 10)]
    (finding,) = worst_layers(routing)
    assert finding == {
        "severity": "bad",
        "layer": 43,
        "metric": "dead_experts",
        "text": "layer 43: 8 of 16 experts (8-15) have received no token since iteration 380",
    }
    assert worst_layers([make_routing(10)]) == worst_layers([]) == []


def test_expert_without_tokens_in_single_iterations_is_not_idle():
    """Each iteration has another expert without tokens, and one has none in all of them."""
    routing = [make_routing(at, (at % 8, 9)) for at in range(1, 21)]
    assert worst_layers(routing[:2]) == []
    (finding,) = worst_layers(routing)
    assert finding["text"] == "layer 43: 1 of 16 experts (9) has received no token since iteration 1"
    assert finding["severity"] == "warn"
    routing[-1]["tokens_per_expert"][1][9] = 1
    assert worst_layers(routing) == []
    routing[-2]["tokens_per_expert"] = [[0] * 4] * 2  # resumed with another model
    assert worst_layers([*routing[:-1], *(make_routing(at, (9,)) for at in (21, 22))]) == []


def test_few_idle_experts_and_the_busiest_are_named():
    records = [make_routing(at, (2, 15), loads=(1.0, 5.0)) for at in (30, 31, 32)]
    records[-1]["tokens_per_expert"][1][3] = 9
    (finding,) = worst_layers(records)
    assert finding["text"] == (
        "layer 43: 2 of 16 experts (2, 15) have received no token since iteration 30; the busiest expert (3) has 5.0 "
        "times the mean load"
    )


def test_names_of_many_idle_experts_are_cut():
    records = [make_routing(at) for at in (1, 2, 3)]
    for each in records:
        each["tokens_per_expert"][1] = [1, 0] * 20 + [0, 0]
    (finding,) = worst_layers(records)
    assert "22 of 42 experts (1, 3, 5, 7, 9, 11, 13, 15 and 14 more) have received" in finding["text"]


def test_worst_layer_comes_first():
    routing = [make_routing(10, loads=(12.0, 4.0), entropy=(0.5, 0.9))]
    routing[0]["tokens_per_expert"][0] = [3] * 5 + [30, 1] + [3] * 5 + [9] + [3] * 3
    first, second = worst_layers(routing)
    assert (first["layer"], first["severity"]) == (2, "bad") and (second["layer"], second["severity"]) == (43, "warn")
    assert first["text"] == (
        "layer 2: the busiest expert (5) has 12.0 times the mean load; the normalized load entropy is 0.50 (half of the "
        "tokens go to 3 of 16 experts: 0, 5, 12)"
    )


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
    routing = [make_routing(at) for at in (1, 2)]
    even, skewed = [1] * 16, [1] * 8 + [3] * 8
    for loads, words in (
        ([skewed, skewed], "Routing may explain it: the busiest expert-parallel rank receives 1.5 times the mean"),
        ([skewed, skewed[::-1]], "Routing does not explain it: the busiest expert-parallel rank receives 1.0 times"),
        ([even, even], "Routing does not explain it"),
    ):
        for each in routing:
            each["tokens_per_expert"] = loads
        (finding,) = find_problems([], routing, ranks, RunSizes(num_experts=16, world_size=2, expert_ranks=2))
        assert words in finding["text"]
    (finding,) = find_problems([], routing, ranks, RunSizes(num_experts=16, world_size=2))
    assert "Routing" not in finding["text"]


def test_what_was_not_recorded_is_named_with_its_flag():
    (finding,) = find_problems([{"iteration": 1}], [], [], RunSizes(num_experts=8, world_size=2))
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
    now = time.time()
    assert "--moe-per-layer-logging" in (text := run.as_page(now)["findings"][0]["text"]) and "--log-straggler" in text
    health = {"rank_max_over_mean": [1.0, 1.0], "straggler_cost": 0.0}
    health |= make_routing(0)
    del health["iteration"]
    for at in (2, 3):
        run.take({"iteration": at, "routing": health, "own_time_ms": {"ranks": [1.0, 2.0]}})
    (finding,) = run.as_page(now)["findings"]
    assert "Routing does not explain it" in finding["text"]
    odd = RunData("odd", "metrics.jsonl")
    odd.take({"iteration": 1, "run": {"model": [], "mapping": {"world_size": "two", "ep": -1}}})
    assert odd.as_page(now)["findings"][0]["text"] == "nothing unusual in the loss"


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


def test_divergence_is_found():
    """Of a run at --lr 10: loss and gradient norm leap after few iterations; also where that is all that there is."""
    start = [{"iteration": at, "lm loss": 8.3, "grad_norm": 2.0, "learning_rate": 10.0} for at in (1, 2, 3)]
    leapt = [{"iteration": at, "lm loss": 104.0, "grad_norm": 5e11, "learning_rate": 1.0} for at in range(4, 16)]
    texts = {each["text"]: each["severity"] for each in find_problems(start + leapt, [], [], RunSizes(vocab_size=4096))}
    assert texts == {
        "the training loss is 104: a uniform guess over 4,096 tokens has 8.32": "bad",
        "the training loss is 104, 13 times that of earlier iterations (8.3)": "bad",
        "the gradient norm is 5e+11, 2.5e+11 times that of earlier iterations (2)": "bad",
    }


def test_divergence_is_found_in_the_few_records_of_a_run_that_dies_early():
    def texts(*losses, norms=(), vocab_size=None):
        found = [{"iteration": at, "lm loss": loss, "learning_rate": at} for at, loss in enumerate(losses, 1)]
        for each, norm in zip(found, norms):
            each["grad_norm"] = norm
        problems = find_problems(found, [], [], RunSizes(vocab_size=vocab_size))
        return [each["text"] for each in problems if each["severity"] == "bad"]

    leapt = "the training loss is 588, 71 times that of earlier iterations (8.33)"
    assert texts(8.33, 588.0) == texts(8.33, 8.33, 588.0) == [leapt]
    assert texts(8.33, 588.0, vocab_size=4096)[0].startswith("the training loss is 588: a uniform guess over 4,096")
    assert texts(104.0, vocab_size=4096) and not texts(104.0)
    assert texts(8.3, 8.4, norms=(2.0, 7e11)) == [
        "the gradient norm is 7e+11, 3.5e+11 times that of earlier iterations (2)"
    ]
    assert texts(9.5, 10.2, 9.1, norms=(3.0, 40.0, 9.0), vocab_size=4096) == []


def test_end_and_divergence_come_before_other_bad_findings():
    ended = {"severity": "bad", "card": "events", "text": "the run failed"}
    records = [{"iteration": at, "lm loss": 8.0 if at < 4 else 80.0} for at in range(1, 7)]
    slow = [{"iteration": at, "ranks": [100.0, 180.0]} for at in (1, 2)]
    collapsed = [make_routing(at, range(8), loads=(1.0, 9.0)) for at in (1, 2, 3)]
    found = find_problems(records, collapsed, slow, ended=ended)
    assert [each["card"] for each in found] == ["events", "loss", "ranks", "routing"]
    assert {each["severity"] for each in found} == {"bad"}


def test_loss_is_compared_with_a_guess_after_the_warmup():
    def severities(loss, records, warmup):
        rates = [min(1.0, at / warmup) for at in range(1, records + 1)]
        found = [{"iteration": at, "lm loss": loss, "learning_rate": rate} for at, rate in enumerate(rates, 1)]
        return [each["severity"] for each in find_problems(found, [], [], RunSizes(vocab_size=1000))]

    guess = 6.91
    assert severities(guess + 0.2, 40, 50) == severities(guess + 0.2, 10, 1) == severities(guess, 100, 1) == ["ok"]
    assert severities(guess + 0.2, 40, 10) == severities(guess + 1.1, 10, 1) == ["bad"]


def test_learning_rate_is_compared_with_that_of_models_of_the_size():
    def found(rate, parameters=125_000_000, **settings):
        run = RunData("run", "metrics.jsonl")
        head = {
            "all_settings": {"lr": rate, "optimizer": "adam", **settings},
            "model": {"active_parameters": parameters},
        }
        run.take({"iteration": 1, "run": head})
        return run.as_page(updated=time.time())["findings"][0]["text"]

    assert found(10.0) == (
        "the learning rate 10 is 16,667 times what models of 125 million active parameters use with Adam (about 0.0006)"
    )
    assert "a 6,000th of what" in found(1e-7) and "10 is 2e+33 times what" in found(1e30).replace("1e+30", "10")
    quiet = "nothing unusual in the loss"
    for parameters, rate in ((5e6, 5e-3), (125e6, 6e-4), (37e9, 2.2e-4), (175e9, 6e-5), (13e9, 1e-6)):
        assert found(rate, int(parameters)) == quiet
    for others in ({"use_mup": True}, {"optimizer": "lion"}, {"lora_dim": 8}):
        assert found(10.0, **others) == quiet


def test_thresholds_of_findings():
    """Drops of more than a percent, low entropy, a loss that rose by a tenth, and a rank that needs a fifth more time."""
    record = make_routing(10, entropy=(0.79, 0.81)) | {"drop_rate": [0.01, 0.02]}
    dropped, uneven = sorted(worst_layers([record]), key=lambda each: -each["layer"])
    assert dropped["text"] == "layer 43: 2 % of the chosen tokens are dropped"
    assert uneven["text"].startswith("layer 2: the normalized load entropy is 0.79 (half of the tokens go to 8 of 16")
    for rise, expected in ((0.09, "ok"), (0.15, "warn")):
        losses = [{"iteration": at, "lm loss": 2.0 + (rise if at > 60 else 0.0)} for at in range(1, 101)]
        assert [each["severity"] for each in find_problems(losses, [], [])] == [expected]
    for slow, expected in ((119.0, "ok"), (121.0, "bad")):
        times = [{"iteration": at, "ranks": [100.0, slow, 100.0]} for at in range(5)]
        assert find_problems([{"iteration": 1}], [], times)[0]["severity"] == expected
