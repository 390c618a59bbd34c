"""Route requests to the servers of a placement's groups, over HTTP.

In: the addresses of servers, each of which runs the models of a group; requests.
Out: the servers' replies; metrics; new placements when rates drift.
Imported by: cli.
"""
