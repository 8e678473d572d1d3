"""SVG of matplotlib made fit to stand in an HTML page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bisls.report.palette import VARIABLES


def inline(svg: str, prefix: str, alt: str) -> str:
    """SVG that can stand in an HTML page: ids of its own, the page's colours and fonts, a text for those who can't see."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # matplotlib's style would apply to the whole page
                parent.remove(child)
    used = {name for element in root.iter() for value in element.attrib.values() for name in _LINK.findall(value)}
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
        element.text, element.tail = (text if text and text.strip() else None for text in (element.text, element.tail))
        attributes = {name.split("}")[-1]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        paint = [f"{name}: {attributes.pop(name)}" for name in ("fill", "stroke") if name in attributes]
        if paint:  # variables work in styles only
            attributes["style"] = "; ".join([*paint, *filter(None, [attributes.get("style")])])
        for name, value in attributes.items():
            element.set(name, _attribute(name, value, prefix))
    size = root.get("viewBox", "")
    root.attrib.clear()
    root.set("viewBox", size)
    if alt:
        root.set("role", "img")
        root.set("aria-labelledby", f"{prefix}-title")
        title = ElementTree.Element("title", {"id": f"{prefix}-title"})
        title.text = alt
        root.insert(0, title)
    else:
        root.set("aria-hidden", "true")
    return ElementTree.tostring(root, encoding="unicode")


_LINK = re.compile(r"(?:^|url\()#([\w.-]+)")
_DECIMALS = re.compile(r"-?\d+\.\d+")


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "style":
        rules = [rule.strip().partition(": ") for rule in value.split(";") if rule.strip()]
        value = "; ".join(
            f"{what}: {VARIABLES.get(set_to, set_to)}" for what, _, set_to in rules if what != "font-family"
        )
    if name in ("d", "x", "y", "width", "height", "transform"):
        digits = 1 if name == "d" and len(value) > 2000 else 2
        value = _DECIMALS.sub(lambda found: _short(found[0], digits), " ".join(value.split()))
        if name == "d" and not set("CQ") & set(value):
            value = value.replace(" L ", " ")  # pairs that follow a pair are lines by themselves
    return _LINK.sub(lambda found: found[0].replace(f"#{found[1]}", f"#{prefix}-{found[1]}"), value)


def _short(number: str, digits: int) -> str:
    return f"{float(number):.{digits}f}".rstrip("0").rstrip(".")
