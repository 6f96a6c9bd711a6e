"""From a traced step to a StepPlan: splits, and a program for each native one."""

from jaxgraph.errors import PlanError
from jaxgraph.plan.step import Split, StepPlan, plan_step

__all__ = ["PlanError", "Split", "StepPlan", "plan_step"]
