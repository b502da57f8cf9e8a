"""--nccl-communicator-config-path, --high-priority-stream-groups, --high-priority-a2a-comm-stream."""

import logging
import types

import pytest
import torch.distributed as dist

from arguments import parse_args
from moe_trainer.errors import UserError
from moe_trainer.parallel.grid import make_layout
from moe_trainer.parallel.groups import plan_groups
from moe_trainer.parallel.nccl_options import read_options
from moe_trainer.parallel.state import ParallelState
from tests.arguments.test_tokens import TOY

FILE = "ep:\n  max_ctas: 8\n  net_name: IB\nep_dp:\n  cga_cluster_size: 2\n"
GROUPS = plan_groups(make_layout(4, ep=2))


class Options:
    """ProcessGroupNCCL.Options, which a build of torch without CUDA lacks."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config = is_high_priority_stream, types.SimpleNamespace()


def made_groups(monkeypatch, backend, nccl):
    """Options of every communicator, by its description."""
    made = {}

    def new_group(ranks, group_desc, pg_options, **_):
        made[group_desc, tuple(ranks)] = pg_options
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=Options), raising=False)
    ParallelState.create(4, 0, ep=2, nccl=nccl)
    return made


def test_file_and_flags_reach_the_communicators(monkeypatch, tmp_path):
    path = tmp_path / "nccl.yaml"
    path.write_text(FILE)
    args = parse_args(
        [
            *TOY,
            "--high-priority-a2a-comm-stream",
            "--high-priority-stream-groups",
            "dp",
            "--nccl-communicator-config-path",
        ]
        + [str(path)],
        1,
    )
    options = read_options(str(path), args.parallel.high_priority_groups, GROUPS)
    made = made_groups(monkeypatch, "cpu:gloo,cuda:nccl", options)
    expert = [made["expert: ep", ranks] for ranks in ((0, 1), (2, 3))]
    assert all(
        each.is_high_priority_stream and vars(each.config) == {"max_ctas": 8, "net_name": "IB"} for each in expert
    )
    (dense,) = [each for (name, _), each in made.items() if name == "gradients: dp"]
    assert dense.is_high_priority_stream and not vars(dense.config)
    sharded = [each for (name, _), each in made.items() if name == "gradients: edp"]
    assert [(each.is_high_priority_stream, vars(each.config)) for each in sharded] == [
        (False, {"cga_cluster_size": 2})
    ] * 2
    others = {name for (name, _), each in made.items() if each is None}
    assert others == {"statistics: tp_dp_cp", "embedding: embedding"} & {name for name, _ in made} and others


def test_gloo_takes_no_options(monkeypatch):
    options = read_options(None, ["ep"], GROUPS)
    assert set(made_groups(monkeypatch, "gloo", options).values()) == {None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ep: 3", "name of a group on every line"),
        ("ep:\n  ctas: 3", "ep: ctas: 3 is no option of a communicator; known: cga_cluster_size"),
        ("ep:\n  max_ctas: many", "max_ctas: 'many' is no option"),
        ("experts:\n  max_ctas: 3", "there is no group experts; there are .*dp_cp.*ep_dp"),
        ("ep: [", "not YAML"),
        (None, "nccl-communicator-config-path .*nccl.yaml.*No such file"),
    ],
)
def test_unusable_files_are_errors_of_the_user(tmp_path, content, message):
    path = tmp_path / "nccl.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_options(str(path), [], GROUPS)


def test_unknown_group_of_the_flag_is_an_error_of_the_user():
    with pytest.raises(UserError, match="--high-priority-stream-groups experts: there is no group experts"):
        read_options(None, ["experts"], GROUPS)


def test_groups_that_only_megatron_has_are_skipped(caplog):
    with caplog.at_level(logging.INFO):
        assert set(read_options(None, ["mp", "tp_ep_mp"], GROUPS)) == {"tp_ep"}
    assert caplog.messages == ["NCCL options of mp: this program has no such communicator"]
