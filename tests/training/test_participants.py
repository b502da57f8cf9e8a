"""A statistic that a module registers is reported without an edit of the training loop."""

import torch
from training.forked import pretrain
from training.tiny import MOCK, TINY

from moe_trainer.moe.router import TopKRouter
from moe_trainer.participant import MeanStatistic, Participant, Participants, StepMetrics


class Toy(Participant):
    def __init__(self, length: int):
        self.length, self.seen = length, []

    def end_step(self, sums, num_microbatches):
        self.seen.append((tuple(sums), num_microbatches))
        return StepMetrics({f"toy {self.length}": sum(sums)}, {f"detail_{self.length}": self.length})


def test_each_participant_gets_its_own_sums():
    toys = [Toy(0), Toy(2), Toy(1)]
    metrics = Participants(toys).end_step({1: [1.0, 2.0], 2: [5.0]}, 4)
    assert [toy.seen for toy in toys] == [[((), 4)], [((1.0, 2.0), 4)], [((5.0,), 4)]]
    assert metrics.losses == {"toy 0": 0.0, "toy 2": 3.0, "toy 1": 5.0} and metrics.details["detail_2"] == 2


def test_statistic_of_a_router_is_reported_without_an_edit_of_the_loop(tmp_path, monkeypatch, capfd):
    """The mean over stages, layers and microbatches is in metrics.jsonl and in the log line; one stage may have another."""
    build, forward = TopKRouter.__init__, TopKRouter.forward

    def build_with_statistics(self, *args, **options):
        build(self, *args, **options)
        self.statistic = MeanStatistic("toy router statistic")
        self.num_passes = 0
        if self.layer_number == 2:
            self.passes = MeanStatistic("toy passes")

    def forward_and_add(self, *args, **options):
        self.statistic.add(torch.tensor(float(self.layer_number)))
        self.num_passes += torch.is_grad_enabled()
        if self.layer_number == 2:
            self.passes.add(torch.tensor(float(self.num_passes)))
        return forward(self, *args, **options)

    monkeypatch.setattr(TopKRouter, "__init__", build_with_statistics)
    monkeypatch.setattr(TopKRouter, "forward", forward_and_add)
    stages = "--train-iters 2 --pipeline-model-parallel-size 2".split()
    records, _ = pretrain([*TINY, *MOCK, *stages], tmp_path, world_size=2)
    values = [record["toy router statistic"] for record in records if "toy router statistic" in record]
    assert values == [1.5, 1.5]  # of layers 1 and 2, which are on two stages
    assert capfd.readouterr().out.count("toy router statistic: 1.500000E+00") == 2
    first, second = (record["toy passes"] for record in records if "toy passes" in record)
    assert second - first == 2 * first - 1, "every iteration has its own mean, of the passes 1 to N, and N + 1 to 2 N"
