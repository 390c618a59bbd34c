"""Implement the command line: parse arguments, call the library, print the result.

In: command-line arguments.
Out: text, files, an exit code.
Imported by: `__main__`.
"""
