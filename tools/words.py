"""Hold the prose to words that everybody uses.

    python tools/words.py            # exit status 1 where a word is used too often, and where it is

*After*, *during*, *next to* and *again* say to more readers what "behind", "beside" and "anew" say.
"Behind" and "beside" may stand where a place is meant, seldom.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = (
    "README.md",
    "CONTRIBUTING.md",
    "index.rst",
    "guide/*.rst",
    "harness/README.md",
    "recipes_source/**/*.rst",
    "recipes_source/**/*.py",
    "overlap_recipes/**/*.py",
)
AT_MOST = {  # times, in all files
    r"behind|beside": 30,
    r"anew": 0,
    r"is another than|is others'": 0,
    r"(?:beside|behind) (?:training|the (?:save|step|steps|optimizer|next step))": 0,
}


def places_of(words: str, root: Path) -> list[str]:
    """``guide/ci.rst:15: the line``, for each time that one of ``words`` stands there."""
    found = []
    for pattern in READ:
        for file in sorted(root.glob(pattern)):
            lines = file.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                times = re.findall(rf"\b(?:{words})\b", line, re.IGNORECASE)
                place = f"{file.relative_to(root)}:{number}: {line.strip()}"
                found += [place] * len(times)
    return found


def main() -> int:
    status = 0
    for words, limit in AT_MOST.items():
        places = places_of(words, ROOT)
        if len(places) > limit:
            status = 1
            print("\n".join(places))
            print(f"{len(places)} times {words}, and {limit} at most", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
