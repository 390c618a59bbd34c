"""Serve models over HTTP with the endpoints of OpenAI's API.

In: models' folders, limits, HTTP requests.
Out: replies, as a whole or as server-sent events; metrics; a live page.
Imported by: cli.
"""

from autopar.serving.app import make_app as make_app
from autopar.serving.limits import Limits as Limits
from autopar.serving.models import Models as Models
from autopar.serving.models import ServedModel as ServedModel
