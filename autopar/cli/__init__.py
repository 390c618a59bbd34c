"""The command line: parse, call, print.

In: a user's command line.
Out: text, files, an exit status.
Imported by: `__main__`.
"""
