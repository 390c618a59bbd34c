"""autopar: decorate a train step, and it runs sharded on every device, by a plan you can read."""

from autopar import vector_search as vector_search
from autopar.api import ParallelStep as ParallelStep
from autopar.api import parallelize as parallelize
from autopar.checkpoints import Checkpoints as Checkpoints
from autopar.diagnose import diagnose as diagnose
from autopar.diagnosis import Diagnosis as Diagnosis
from autopar.diff import PlanDiff as PlanDiff
from autopar.diff import diff as diff
from autopar.explain import explain as explain
from autopar.export import export as export
from autopar.page.document import write_report as write_report
from autopar.pipeline.plan import PipelinePlan as PipelinePlan
from autopar.plan import Plan as Plan
from autopar.plan_step import plan as plan
from autopar.processes.transfers import let_arrays_pass as let_arrays_pass
from autopar.processes.watch import Watch as Watch
from autopar.processes.watch import watch as watch
from autopar.rules.registered import register_rule as register_rule
from autopar.saved_plans import load_plan as load_plan
from autopar.step_report import StepReport as StepReport
from autopar.verification import Verification as Verification
from autopar.verify import verify as verify
from autopar.version import __version__ as __version__
