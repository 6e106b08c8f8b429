"""Run a recipe on several ranks and judge it by what it did, not by its exit code.

``harness.run.run`` starts the ranks, ``harness.judge`` decides, ``python -m harness`` is the
command line. Nothing here is imported by a recipe, and nothing here imports one: recipes are files.
"""
