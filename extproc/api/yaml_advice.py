# SPDX-License-Identifier: Apache-2.0
"""What a YAML parser's complaint means, in words of whoever wrote the file, and the line to look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import yaml

# Before the first character of a line's content; the dashes of list items count as indentation.
_TAB_IN_INDENT: Final = re.compile(r"[ ]*(?:-[ ]*)*\t")
_TWO_COLONS: Final = re.compile(r"^\s*(?:- +)?[\w.\"'-]+:\s+[^\"'\s].*:\s")
_MARKS: Final = ("<<<<<<<", "=======", ">>>>>>>")
# What YAML keeps for itself, and what begins an alias or an anchor.
_REFUSED_STARTS: Final = ("@", "`", "%", "*", "&")
_OTHER_SEPARATOR: Final = re.compile(r"\s+---+\s*|--|----+\s*")
# "name:value" or "name value", alone on its line.
_NO_COLON: Final = re.compile(r"\s*(?:- +)?([\w.-]+)(:| +)(?![:\s]).+")
_AFTER_QUOTE: Final = re.compile(r"""[^"']*: +(?:"[^"]*"|'[^']*') *[^\s#,}\]].*""")
# Where YAML reads braces; within text they do no harm.
_TEMPLATE: Final = re.compile(r"(?:.*[:-])?\s*\{\{")
_RENDER: Final = "holds a template ({{ }}), which is not filled in here; render it first"
_BLANKS: Final = ("\u00a0", "\u200b", "\u2003", "\u3000", "\ufeff")
# Lines before the one that the parser names.
_LOOKS_BACK: Final = 2


def explained(text: str, error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """The line, from 0, and what is wrong there: the usual mistakes by their name, others as the parser says."""
    mark = error.problem_mark or error.context_mark
    lines = text.split("\n")
    at = min(mark.line, len(lines) - 1) if mark else 0
    said = error.problem or error.context or "it cannot be parsed"
    begun = error.context_mark
    if "end of stream" in said and begun is not None and "quoted" in (error.context or ""):
        return begun.line, "a quote is opened here and never closed"
    if begun is not None and "flow" in (error.context or ""):
        return begun.line, "a bracket or brace is opened here and never closed, or an item has no comma after it"
    for number in range(at, max(-1, at - 1 - _LOOKS_BACK), -1):
        if found := _usual_nearby(lines[number]) or (number == at and _usual_here(lines[number], said)):
            return number, found
    before = lines[at - 1] if at else ""
    no_colon = _NO_COLON.fullmatch(before)
    if no_colon and ": " not in before and not before.rstrip().endswith(":") and "mapping values" in said:
        return at - 1, f"'{no_colon[1]}' is no field without a colon and a space after it; write {no_colon[1]}: VALUE"
    return at, _translated(said)


def unreadable(text: str, error: yaml.reader.ReaderError) -> tuple[int, str]:
    """The line, from 0, of a character that YAML forbids."""
    position = getattr(error, "position", 0)
    character = getattr(error, "character", 0)
    code = character if isinstance(character, int) else ord(character[:1] or "\0")
    found = text.find(chr(code))
    line = text.count("\n", 0, found if found >= 0 else position)
    more = "; the file may be UTF-16, save it as UTF-8" if code == 0 else ""
    return line, f"the control character U+{code:04X}, which YAML forbids{more}"


def template_advice(text: str, line: int) -> str:
    """What to say of a template on this line, from 0; empty if there is none."""
    lines = text.split("\n")
    return _RENDER if line < len(lines) and _TEMPLATE.match(lines[line]) else ""


def _usual_nearby(line: str) -> str:
    """Mistakes that a parser may notice lines later."""
    if _TAB_IN_INDENT.match(line):
        return "a tab in the indentation, where YAML takes only spaces; replace each tab by spaces"
    if line.startswith(_MARKS):
        return "a mark of an unfinished merge (git); resolve the conflict"
    if _TEMPLATE.match(line):
        return _RENDER
    if any(one in line for one in _BLANKS):
        return "a blank that is no space (such as a no-break space); write plain spaces"
    if _OTHER_SEPARATOR.fullmatch(line):
        return "dashes that separate no documents; write '---' at the beginning of its line"
    return ""


def _usual_here(line: str, said: str) -> str:
    """Mistakes of the line that the parser names."""
    if line.startswith("```"):
        return "a fence of Markdown; leave the line out"
    value = line.partition(": ")[2].lstrip() or line.lstrip(" -")
    if value.startswith(_REFUSED_STARTS) and ("cannot start any token" in said or "alphabetic or numeric" in said):
        return f"a value must not begin with {value[0]}; put it in quotes"
    if "expected key" in said and _AFTER_QUOTE.fullmatch(line):
        return "text after the closing quote; put the whole value in one pair of quotes"
    if "mapping values" in said and _TWO_COLONS.match(line):
        return "a second ': ' in one line; put the value in quotes"
    return ""


def _translated(said: str) -> str:
    if "mapping values are not allowed" in said:
        return "a field stands deeper than the one before it, or a ':' above has no space after it; align the fields"
    if "could not find expected ':'" in said:
        return "a line without 'name: value'; write a colon and a space after the name, here or in the line above"
    if "did not find expected key" in said or "did not find expected '-' indicator" in said:
        return "the indentation fits no line above; align it with the fields or items that it belongs to"
    return f"{said}; mend the syntax"
