"""Lets the API page show docstrings whose fields are grouped, as configs of Transformers group them."""

import re

import griffe

GROUP = re.compile(r"^(Parameters that control .*):$")
CONTINUED = re.compile(r"^( {4}[\w, ]+,)\n {4}(?=\w)", re.MULTILINE)  # names that go over the line's end
FIELD = re.compile(r"^ {4}([\w, ]+?)( \(.*?\))?: ?(.*)$")


class GroupedFields(griffe.Extension):
    """Turns each `Parameters that control ...:` into a heading with a list, which the page would run together."""

    def on_class(self, *, cls, **kwargs):
        if cls.docstring is None or "Parameters that control" not in cls.docstring.value:
            return
        text = re.sub(r"\[(`\w+`)\]", r"\1", cls.docstring.value)  # a link that only Transformers' pages resolve
        while CONTINUED.search(text):
            text = CONTINUED.sub(r"\1 ", text)
        lines, grouped = [], False
        for line in text.split("\n"):
            if group := GROUP.match(line):
                lines += [f"**{group[1]}**", ""]
                grouped = True
            elif grouped and (field := FIELD.match(line)):
                names = ", ".join(f"`{name}`" for name in field[1].split(", "))
                lines.append(f"- {names}{field[2] or ''}: {field[3]}")
            else:
                grouped = grouped and (not line or line.startswith(" "))
                lines.append(re.sub(r"^ {8}", "  ", line) if grouped else line)
        cls.docstring.value = "\n".join(lines)
