"""Pipeline schedules: an order of tasks per device; functions to build, simulate and draw them."""

from autopar.pipeline.draw.text import timeline_text as timeline_text
from autopar.pipeline.schedule.bidirectional import CHIMERA as CHIMERA
from autopar.pipeline.schedule.bidirectional import DUALPIPE as DUALPIPE
from autopar.pipeline.schedule.kind import PipelineShape as PipelineShape
from autopar.pipeline.schedule.kind import ScheduleKind as ScheduleKind
from autopar.pipeline.schedule.kind import both_ways as both_ways
from autopar.pipeline.schedule.kind import down_and_up as down_and_up
from autopar.pipeline.schedule.kind import in_turn as in_turn
from autopar.pipeline.schedule.kind import one_stage_each as one_stage_each
from autopar.pipeline.schedule.objective import Objective as Objective
from autopar.pipeline.schedule.objective import StageCost as StageCost
from autopar.pipeline.schedule.simulate import simulate as simulate
from autopar.pipeline.schedule.table import build as build
from autopar.pipeline.schedule.tasks import Orders as Orders
from autopar.pipeline.schedule.tasks import Task as Task
from autopar.pipeline.schedule.token_slices import terapipe as terapipe
