"""Edits the text of a config a setting at a time: comments, order and line breaks stay as they are."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeAlias

import yaml

from diffsynth_lite.config.document import YamlError, is_nothing, read_yaml
from diffsynth_lite.config.files import ConfigFile
from diffsynth_lite.errors import UserError

_Entry: TypeAlias = tuple[yaml.ScalarNode, yaml.Node]

_COMMENT = re.compile(r"(^|\s)#")
_LINE_END = re.compile(r"\r?\n|\Z")
_NUMBER = re.compile(r"[-+.\deE]+")
_PREFIX = "x: "


def settings_of(files: Sequence[ConfigFile]) -> dict[str, yaml.Node]:
    """The settings of files as they were written, by ``section.key``; those of a later file win.

    Those of all files but the last hold where the last does not have them.
    """
    return {
        f"{section.value}.{key.value}": node
        for file in files
        for section, block in file.sections
        if isinstance(block, yaml.MappingNode)
        for key, node in block.value
    }


def with_value(text: str, key: str, value: str | None) -> str:
    """A config with another value of one setting, and all else as it was.

    Args:
        key: ``section.key``, which the text need not have yet.
        value: yaml on one line; None takes the setting out.

    Raises:
        UserError: the text is not yaml, or has the setting in a form that cannot be changed by itself.
    """
    section, _, name = key.partition(".")
    try:
        root = read_yaml(text)
    except YamlError as error:
        raise UserError(f"{key}: line {error.line} of the text must be put right first: {error}") from None
    try:
        wanted = _sections(root)
        own = wanted.pop(section, {})
        own.pop(name, None)
        if value is not None:
            own[name] = _content(_value(value))
        wanted |= {section: own} if own else {}
        for edits in _Editor(text, "\r\n" if "\r\n" in text else "\n").edits(root, section, name, value):
            changed = text
            for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
                changed = changed[: edit.start] + edit.new + changed[edit.end :]
            if _is_read_as(changed, wanted):
                return changed
    except (AttributeError, ValueError):  # a section that is none, a key that is there twice
        pass
    raise UserError(f"{key}: cannot be changed by itself as it is written now; change it in the text")


@dataclass(frozen=True)
class _Edit:
    """A text in place of what is between two positions."""

    start: int
    end: int
    new: str = ""


@dataclass(frozen=True)
class _Editor:
    """Knows what to change in a text for another value of a setting."""

    text: str
    line_break: str

    def edits(self, root: yaml.Node, section: str, name: str, value: str | None) -> Iterator[list[_Edit]]:
        """The ways to change it, the best first; some may turn out to be wrong."""
        holder = _entry(root, section)
        old = _entry(holder[1], name) if holder else None
        if holder and old:
            yield from [self._without(holder, old)] if value is None else self._replaced(old, value)
        elif holder and value is not None:
            yield [self._added(holder, name, value)]
        elif value is not None:
            indent = " " * root.value[0][0].start_mark.column if isinstance(root, yaml.MappingNode) else ""
            lines = self._block([f"{indent}{section}:", *_lines(name, value, f"{indent}  ")])
            end, empty = len(self.text), self.line_break * 2
            begins = self.line_break if self._line_start(end) < end else ""
            # In a text whose sections have an empty line between them, this one gets one, too.
            if empty in self.text and not self.text.endswith(empty):
                begins += self.line_break
            yield [_Edit(end, end, begins + lines)]
        else:
            yield []

    def _added(self, holder: _Entry, name: str, value: str) -> _Edit:
        key, section = holder
        entries = section.value if isinstance(section, yaml.MappingNode) else []
        if isinstance(section, yaml.MappingNode) and section.flow_style:
            place = self._end(entries[-1][1]) if entries else section.start_mark.index + 1
            return _Edit(place, place, f"{', ' if entries else ''}{name}: {value}")
        column = entries[0][0].start_mark.column if entries else key.start_mark.column + 2
        place = self._end(section) if entries else key.end_mark.index
        return self._below(self._with_remark(place, column), _lines(name, value, " " * column))

    def _without(self, holder: _Entry, old: _Entry) -> list[_Edit]:
        header, section = holder
        place = section.value.index(old)
        before, after = section.value[:place], section.value[place + 1 :]
        key, node = old
        if section.flow_style:
            start = self._end(before[-1][1]) if before else key.start_mark.index
            return [_Edit(start, after[0][0].start_mark.index if after and not before else self._end(node))]
        start = self._line_start(key.start_mark.index)
        end = self._with_remark(self._end(node), key.start_mark.column)
        if not before and not after and not _COMMENT.search(self.text[header.end_mark.index : start]):
            start = self._line_start(header.start_mark.index)
            if self.text[:start].endswith(self.line_break * 2):  # the empty line before the section
                start -= len(self.line_break)
        return [_Edit(start, self._next_line(end))]

    def _replaced(self, old: _Entry, value: str) -> Iterator[list[_Edit]]:
        key, node = old
        start, end = node.start_mark.index, self._end(node)
        if is_nothing(node):
            yield [_Edit(start, start, f" {value}")]
        elif not _is_block(node):
            yield [_Edit(start, end, value)]
        else:
            given = _value(value)
            if isinstance(node, yaml.SequenceNode) and isinstance(given, yaml.SequenceNode) and given.value:
                yield self._with_entries(node, _sources(value, given))
            colon = self.text.index(":", key.end_mark.index) + 1
            rest = _Edit(self._line_end(colon), end)
            if not _COMMENT.search(self.text[rest.start : rest.end]):
                yield [_Edit(colon, colon, f" {value}"), rest]

    def _with_entries(self, node: yaml.SequenceNode, wanted: Sequence[str]) -> list[_Edit]:
        """Changes the entries that differ, so that comments next to the others stay."""
        old, indent, edits = node.value, " " * node.start_mark.column, []
        before, after = ([repr(_content(each)) for each in nodes] for nodes in (old, map(_value, wanted)))
        for kind, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind == "equal":
                continue
            both = min(b - a, d - c)
            for entry, source in zip(old[a : a + both], wanted[c : c + both], strict=True):
                edits.append(_Edit(entry.start_mark.index, self._end(entry), source))
            for entry in old[a + both : b]:
                start = self._line_start(entry.start_mark.index)
                edits.append(_Edit(start, self._next_line(self._end(entry))))
            lines = [f"{indent}- {source}" for source in wanted[c + both : d]]
            if lines and a + both:
                edits.append(self._below(self._end(old[a + both - 1]), lines))
            elif lines:
                start = self._line_start(node.start_mark.index)
                edits.append(_Edit(start, start, self._block(lines)))
        return edits

    def _below(self, position: int, lines: Sequence[str]) -> _Edit:
        """Lines below the one of a position."""
        end = self._line_end(position)
        return _Edit(end, end, self.line_break + self.line_break.join(lines))

    def _block(self, lines: Sequence[str]) -> str:
        return "".join(f"{line}{self.line_break}" for line in lines)

    def _end(self, node: yaml.Node) -> int:
        """Where the last word of it ends; to yaml, a block reaches to the next word, past comments."""
        start, end = node.start_mark.index, node.end_mark.index
        if _is_block(node) and node.value:
            last = node.value[-1]
            return self._end(last[1] if isinstance(last, tuple) else last)
        return int(start) + len(self.text[start:end].rstrip())

    def _with_remark(self, position: int, column: int) -> int:
        """The end of the comment that begins on a line and goes on in the next, further in than the keys."""
        lines = re.compile(rf"[^\r\n]*(\r?\n {{{column + 1},}}#[^\r\n]*)*")
        found = lines.match(self.text, position)
        return found.end() if found else position

    def _line_start(self, position: int) -> int:
        return self.text.rfind("\n", 0, position) + 1

    def _line_end(self, position: int) -> int:
        """Before its line break."""
        return next(_LINE_END.finditer(self.text, position)).start()

    def _next_line(self, position: int) -> int:
        return next(_LINE_END.finditer(self.text, position)).end()


def _lines(name: str, value: str, indent: str) -> list[str]:
    """A new setting; texts, which may be long, have a line each."""
    given = _value(value)
    if not isinstance(given, yaml.SequenceNode) or all(
        isinstance(node, yaml.ScalarNode) and _NUMBER.fullmatch(node.value) for node in given.value
    ):
        return [f"{indent}{name}: {value}"]
    return [f"{indent}{name}:", *(f"{indent}  - {source}" for source in _sources(value, given))]


def _sources(value: str, given: yaml.SequenceNode) -> list[str]:
    """The entries of a list as they are written in ``value``."""
    starts = len(_PREFIX)
    return [value[entry.start_mark.index - starts : entry.end_mark.index - starts] for entry in given.value]


def _value(text: str) -> yaml.Node:
    """The node of a value."""
    [(_, value)] = read_yaml(_PREFIX + text).value
    return value


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def _entry(node: yaml.Node, name: str) -> _Entry | None:
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return next(((key, value) for key, value in entries if key.value == name), None)


def _content(node: yaml.Node) -> Any:
    """What a node holds, wherever it is and however it is laid out.

    Raises:
        ValueError: it has a key twice.
    """
    if isinstance(node, yaml.SequenceNode):
        return list(map(_content, node.value))
    if isinstance(node, yaml.MappingNode):
        content = {key.value: _content(value) for key, value in node.value}
        if len(content) < len(node.value):
            raise ValueError("a key comes twice")
        return content
    return node.value, node.style is None


def _sections(root: yaml.Node) -> dict[str, Any]:
    """The content of each section that has any."""
    content = {} if is_nothing(root) else _content(root)
    return {name: own for name, own in content.items() if own not in ({}, ("", True))}


def _is_read_as(text: str, sections: dict[str, Any]) -> bool:
    try:
        return _sections(read_yaml(text)) == sections
    except YamlError:
        return False
