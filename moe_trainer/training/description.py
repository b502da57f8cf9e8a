"""Files that say what a run was built of, written once before it trains: --config-logger-dir, --dump-param-to-param-group-map."""

from dataclasses import asdict

from moe_trainer.optim.param_groups import group_of
from moe_trainer.parallel import collectives
from moe_trainer.report.configuration import parameter_names, write_configuration, write_group_map
from moe_trainer.run import Run
from moe_trainer.training.agreement import written_by_all


def describe_run(run: Run) -> None:
    """Write what the flags ask for. Collective where one of them is given.

    Raises: InputError on every rank when a file cannot be written.
    """
    folder, path = run.args.output.config_logger_dir, run.args.optimizer.dump_param_to_param_group_map
    if folder:
        with written_by_all(run, f"--config-logger-dir {folder}"):
            write_configuration(folder, run.args.as_dict(), run.chunks, run.ps)
    if path is not None:
        groups = _groups(run)
        with written_by_all(run, f"--dump-param-to-param-group-map {path}"):
            if run.ps.world.rank == 0:
                write_group_map(path, groups)


def _groups(run: Run) -> dict[str, dict]:
    """The parameter group of every parameter of the model, by name. Collective."""
    optimizer, expert_parallel = run.args.optimizer, run.ps.ep.size > 1
    mine = {name: asdict(group_of(param, optimizer, expert_parallel)) for param, name in parameter_names(run.chunks)}
    return {name: group for each in collectives.all_gather_object(mine, run.ps.world) for name, group in each.items()}
