"""Run a script on several ranks and judge it by what it did, not by its exit code.

``rankproof.run.run`` starts the ranks, ``rankproof.judge`` decides, ``rankproof`` is the command
line. Nothing here is imported by a script that is judged, and nothing here imports one: they are
files.
"""

__version__ = "0.1.0"
