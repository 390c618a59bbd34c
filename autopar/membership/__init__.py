"""Decide which hosts train together, after failures too, and keep copies of the training state in the memory of peers.

In: a command that trains, run by an agent on each host; reports of the agents.
Out: generations: members whose workers train together, each started from the newest copy of the state.
Imported by: cli, through `autopar keep`; api/elastic; versions.
"""
