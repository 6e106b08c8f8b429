"""Reports for people, programs and CI: text, JSON, JUnit's XML, GitHub's annotations."""

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from rankproof.report import Report

ON_GITHUB = "GITHUB_ACTIONS"
# What GitHub's commands would take for their own syntax.
MESSAGE_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
PROPERTY_ESCAPES = MESSAGE_ESCAPES | {":": "%3A", ",": "%2C"}


def as_text(report: Report, shows_outputs: bool) -> str:
    """The report, and what each rank of a run that went well has printed."""
    lines = [report.describe()]
    if shows_outputs and not report.failures:
        for rank, output in enumerate(report.outputs):
            lines.append(f"--- rank {rank}\n{output.rstrip()}")
    return "\n".join(lines)


def as_json(reports: list[Report]) -> str:
    tables = [report.to_dict() | {"verdict": report.verdict} for report in reports]
    return json.dumps(tables, indent=1)


def status_of(reports: list[Report]) -> int:
    """The worst: 1, judged bad, then 2, not judged."""
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else max(codes)


def junit(reports: list[Report]) -> str:
    """The reports as JUnit's XML: what failed is a failure, what was not judged is skipped."""
    failed = [report for report in reports if report.failures]
    skipped = [report for report in reports if report.verdict == "not judged"]
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name="rankproof",
        tests=str(len(reports)),
        failures=str(len(failed)),
        skipped=str(len(skipped)),
        errors="0",
        time=f"{sum(report.seconds for report in reports):.1f}",
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    for report in reports:
        suite.append(test_case(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def test_case(report: Report) -> ElementTree.Element:
    file = from_here(report.path)
    case = ElementTree.Element(
        "testcase",
        classname=".".join(file.parent.parts) or ".",
        name=f"{file.name} on {report.which_ranks}",
        file=str(file),
        time=f"{report.seconds:.1f}",
    )
    if report.failures:
        failure = report.failures[0]
        told = ElementTree.SubElement(case, "failure", type=failure.kind, message=failure.text)
        told.text = without_control_characters(report.describe())
    elif report.verdict == "not judged":
        ElementTree.SubElement(case, "skipped", message="; ".join(report.unjudged))
    printed = "\n".join(report.outputs)
    if printed.strip():
        out = ElementTree.SubElement(case, "system-out")
        out.text = without_control_characters(printed)
    return case


def without_control_characters(text: str) -> str:
    """XML has no place for them, not even escaped."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def from_here(path: str, here: Path | None = None) -> Path:
    """Relative to ``here``, the directory of the command, where it lies below that."""
    here = here or Path.cwd()
    return Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)


def annotations(report: Report) -> list[str]:
    """GitHub's commands that put each failure at its line of the script's file."""
    if ON_GITHUB not in os.environ:
        return []
    lines = []
    for failure in report.failures:
        title = f"{failure.kind} on {report.which_ranks}"
        where = line_of(failure.text, failure.rank, report)
        text = f"{failure.text}\n{failure.hint}" if failure.hint else failure.text
        lines.append(annotation("error", report.path, where, title, text))
    if report.verdict == "not judged":
        text = "; ".join(report.unjudged)
        lines.append(annotation("warning", report.path, 1, "not judged", text))
    return lines


def annotation(level: str, path: str, line: int, title: str, text: str) -> str:
    root = os.environ.get("GITHUB_WORKSPACE")  # of the repository, wherever the command runs
    place = from_here(path, Path(root) if root else None)
    file = escaped(str(place), PROPERTY_ESCAPES)
    named = escaped(title, PROPERTY_ESCAPES)
    return f"::{level} file={file},line={line},title={named}::{escaped(text, MESSAGE_ESCAPES)}"


def escaped(text: str, by: dict[str, str]) -> str:
    return "".join(by.get(character, character) for character in text)


def line_of(text: str, rank: int | None, report: Report) -> int:
    """The script's line that a failure names, or that its rank's traceback came through last."""
    name = Path(report.path).name
    named = re.search(rf"{re.escape(name)}:(\d+)", text)
    if named:
        return int(named[1])
    printed = report.outputs[rank] if rank is not None and rank < len(report.outputs) else ""
    lines = re.findall(rf'File "{re.escape(report.path)}", line (\d+)', printed)
    return int(lines[-1]) if lines else 1
