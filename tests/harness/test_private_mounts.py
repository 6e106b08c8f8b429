"""Where the system refuses private mounts, at whichever step, a run goes on without them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from selection import REPO

ENTER = """
    import os, sys
    from unittest import mock
    from rankproof import private

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    def namespaces():
        return [os.readlink(f"/proc/self/ns/{{kind}}") for kind in ("mnt", "user")]

    {refusal}
    before = namespaces()
    user = os.geteuid()
    layers = private.enter(sys.argv[1], [])
    assert layers == {{}}, layers
    assert namespaces() == before, "it is in another namespace, and cannot go back"
    assert os.geteuid() == user, "it is nobody now"
"""
REFUSALS = {  # by the step that is refused
    "the namespace": "mock.patch.object(private, '_enter_namespace', lambda: False).start()",
    "the map of users": "os.geteuid() == 0 and os.setresuid(65534, 65534, 65534); "
    "mock.patch.object(private, '_map_users', refuse).start()",
    "the mount": "mock.patch.object(private, '_mount', refuse).start()",
}


@pytest.mark.parametrize("step", REFUSALS)
def test_a_step_that_is_refused_has_changed_nothing(step: str, tmp_path: Path) -> None:
    """As on Ubuntu from 23.10 on: a namespace of users is made, and what it is for is refused."""
    script = textwrap.dedent(ENTER).format(refusal=REFUSALS[step])
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPO / "harness")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
