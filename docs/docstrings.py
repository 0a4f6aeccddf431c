"""Turn the plain text of docstrings into Markdown: entries into lists, public names into links."""

import re

import griffe

NAMES = r"[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*"
# an entry is "key  text", with two spaces or more, or "name: text" at the start of a paragraph
ENTRY = re.compile(rf" {{0,3}}(?:(?P<key>\S.*?[^\s.:;,?!]) {{2,}}|(?P<name>{NAMES}): (?=\S))(?P<text>\S.*)")


class Markdown(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.is_attribute and obj.annotation and obj.parent.is_class and not obj.docstring:
            comment = obj.source.partition("  # ")[2]  # of a record's field
            obj.docstring = griffe.Docstring(comment.strip(), parent=obj) if comment else None
        if obj.docstring:
            public = set(obj.package.exports or ()) - {obj.name}
            obj.docstring.value = linked(as_lists(obj.docstring.value), public)


def linked(text: str, public: set[str]) -> str:
    def link(found: re.Match) -> str:
        return f"[{found[0]}][moe_aiter.{found[1]}]" if found[1] in public else found[0]

    return re.sub(r"(?<!\*)`(\w+)`", link, text)


def as_lists(text: str) -> str:
    """Write entries as items of a list; leave paragraphs and indented code as they are."""
    lines, indent = [], None  # indent: of the entries of the list that is open
    for line in text.splitlines():
        entry, depth = ENTRY.fullmatch(line), len(line) - len(line.lstrip())
        if entry and (entry["key"] or indent is not None or not lines or not lines[-1]):
            lines += [""] if indent is None else []
            rest = re.sub(r"(?<=[^\s.:;,?!]) {2,}", " · ", entry["text"])  # further columns
            lines.append(f"* **`{entry['key'] or entry['name']}`**: {rest}")
            indent = depth
        elif indent is not None and line and depth > indent:
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if indent is not None and line else [line]
            indent = None
    return "\n".join(lines)
