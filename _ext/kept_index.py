"""Keep the index entries that the search knows from build to build.

Sphinx 7.2 pickles its environment before it writes pages, and the search learns a page's index
entries when that is written. So a second build, which writes the pages that have changed, lost the
entries of all others.
"""

import pickle
from pathlib import Path

from sphinx.application import ENV_PICKLE_FILENAME, Sphinx


def pickle_again(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        data = pickle.dumps(app.env, pickle.HIGHEST_PROTOCOL)
        Path(app.doctreedir, ENV_PICKLE_FILENAME).write_bytes(data)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", pickle_again, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
