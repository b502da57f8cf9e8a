"""The choice of the update rules of a run."""

from arguments.mechanisms.optimizers import get_element_rule, get_optimizer
from arguments.optimizer import OptimizerArgs
from moe_trainer.declared_module import load_module
from moe_trainer.optim.update_rules.rule import ElementRule, MatrixRule
from moe_trainer.parallel.state import ParallelState


def build_element_rule(settings: OptimizerArgs) -> ElementRule:
    """Build the rule of all parameters, or of those that no rule of matrices updates."""
    return load_module(get_element_rule(settings)).make_rule(settings)


def build_matrix_rule(settings: OptimizerArgs, ps: ParallelState) -> MatrixRule | None:
    """Build the rule of full matrices; None if the optimizer has none."""
    optimizer = get_optimizer(settings)
    return load_module(optimizer).make_matrix_rule(settings, ps) if optimizer.updates_matrices else None
