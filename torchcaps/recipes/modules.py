"""Python modules in the folder of a user's recipe: how they are imported, and error messages if one cannot be.

With `--allow_code` a recipe may name networks, routings, losses and data of such modules, for example `network.MyNet`
of `network.py`. `Training` and `Run` call this.
"""

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from torchcaps.recipes import FOLDER
from torchcaps.utils.checks import nearest


class OwnModules:
    """Let this process, and the processes that it starts, import modules from the folders of a recipe's files.

    The folders are appended to `sys.path`, so that a module in them never replaces an installed one. Spawned processes
    copy `sys.path`, and processes that run the command again come here again.

    Args:
        recipe: name of the recipe, for messages.
        files: its files; the folders of those outside the package are added.
        allowed: whether the recipe may use code of its own. Otherwise no folder is added.

    Attributes:
        files: absolute paths of the user's own files, none if their code is not allowed.
    """

    def __init__(self, recipe: str, files: Iterable[Path], allowed: bool):
        self.recipe = recipe
        # Where a file is a link, its folder is that of the link.
        absolute = [file.parent.resolve() / file.name for file in files]
        self.files = [file for file in absolute if allowed and not file.is_relative_to(FOLDER.resolve())]
        self.folders = list(dict.fromkeys(file.parent for file in reversed(self.files)))
        sys.path += [str(folder) for folder in self.folders if str(folder) not in sys.path]

    def why_not(self, error: BaseException | None) -> str | None:
        """Return why a name in the recipe cannot be imported, given the error of its import; None for other errors."""
        hidden = self._hidden()
        module, name = None, None
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
            module, name = error.obj, error.name
        elif isinstance(error, ImportError):
            name = error.name
        top = ((module.__name__ if module else name) or "").partition(".")[0]
        if top in hidden:
            return _hidden_message(top, hidden[top])
        if error and (place := self._place(error)):
            message = error.msg if isinstance(error, SyntaxError) else error
            return f"needs {place}, which cannot be imported: {type(error).__name__}: {message}"
        if module:
            known = nearest(str(name), [known for known in dir(module) if not known.startswith("_")])
            hint = known if known.startswith("; did") else ": correct the name"
            return f"there is no {name!r} in {_file(module) or module.__name__}{hint}"
        if isinstance(error, ModuleNotFoundError):
            place = f"into {self.folders[0]}" if self.folders else "beside a recipe of your own"
            advice = "" if top in sys.modules else f", put {top}.py {place}, or install it"
            return f"there is no module {name!r}: correct the name{advice}"
        return None

    def _place(self, error: BaseException) -> str | None:
        """Return the line of a module in the recipe's folders that raised an error while it was imported, or None."""
        stack = traceback.extract_tb(error.__traceback__)
        lines = [(frame.filename, frame.lineno) for frame in stack if frame.name == "<module>"]
        if isinstance(error, SyntaxError) and error.filename:
            lines.append((error.filename, error.lineno))
        for file, line in reversed(lines):
            for folder in self.folders:
                inside = Path(file).relative_to(folder).parts if Path(file).is_relative_to(folder) else ()
                if inside and inside[0] != "torchcaps" and "site-packages" not in inside:
                    return f"{file}, line {line}"
        return None

    def _hidden(self) -> dict[str, Path]:
        """Return names and files of modules and packages in the recipe's folders that another module of the same name
        hides. torchcaps itself, in a clone, is none of them."""
        hidden = {}
        for folder in self.folders:
            for path in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
                name = path.stem if path.parent == folder else path.parent.name
                if name in sys.modules and name not in ("torchcaps", "__main__"):
                    file = _file(sys.modules[name])
                    if file is None or Path(file).resolve() != path.resolve():
                        hidden[name] = path
        return hidden


def _file(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


def _hidden_message(name: str, path: Path) -> str:
    other = _file(sys.modules[name]) or "built into Python"
    return f"{path} is hidden by another module {name!r}, which is {other}: give yours a name of its own"
