"""nbdev's renderer of signatures, except that an annotation which cannot be evaluated is shown as it is written.

Names imported under `if TYPE_CHECKING:` do not exist while a page is processed; `settings.ini` names this renderer.
"""

from nbdev.showdoc import BasicMarkdownRenderer


class AsWritten:
    """The text of an annotation, shown without quotes."""

    def __init__(self, text: str) -> None:
        self.__name__ = text


def keep_unresolved(function) -> None:
    """Replace each string annotation of `function` that does not evaluate by its text."""
    notes, names = getattr(function, "__annotations__", None), getattr(function, "__globals__", None)
    if not isinstance(notes, dict) or names is None:
        return
    for name, note in notes.items():
        if isinstance(note, str):
            try:
                eval(note, names)  # noqa: S307 - what inspect.signature(eval_str=True) does next
            except (NameError, AttributeError):
                notes[name] = AsWritten(note)


class Renderer(BasicMarkdownRenderer):
    def __init__(self, sym, *args, **options) -> None:
        parts = [getattr(sym, name, None) for name in ("__init__", "__new__", "__call__", "fget", "func", "__func__")]
        for part in (sym, *parts):
            keep_unresolved(getattr(part, "__wrapped__", part))
        super().__init__(sym, *args, **options)
