"""What cured a wrong result is marked in the changelog, and stands on a page of its own."""

from guide import CHANGELOG, MARK, wrong_results

LOG = """Changelog
=========

2026-02-02
----------

* A new page.
* **Wrong results.** Cured: old weights
  were saved.
* Another page.

2026-01-01
----------

* Nothing was wrong.
"""


def test_marked_entries_stand_under_their_date_without_the_mark() -> None:
    assert wrong_results(LOG) == {"2026-02-02": ["* Cured: old weights\n  were saved.\n"]}


def test_every_mark_of_the_changelog_is_found() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    found = [entry for entries in wrong_results(text).values() for entry in entries]
    assert len(found) == text.count(MARK) > 0
